"""Run an optimizer's own step on other tensors: replace its parameters, gradients and state, then restore them."""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxamp.optim.errors import NotCompilableError
from fxamp.optim.reading.fingerprint import fingerprint, own_attributes
from fxamp.torch_private import compile_lock, compiling_flag


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """Return the class's own step, without the wrapper that torch adds for hooks and the profiler."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def needs_arguments(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step has required arguments: LBFGS's needs a closure."""
    _, *parameters = inspect.signature(plain_step(optimizer)).parameters.values()
    optional = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return any(argument.default is argument.empty and argument.kind not in optional for argument in parameters)


def replaced_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step`` is not the class's step; the wrapper that schedulers add to count steps is ignored."""
    own = vars(optimizer).get("step")
    return own is not None and inspect.unwrap(own) is not inspect.unwrap(type(optimizer).step)


def wrapped_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return an optimizer that ``optimizer`` holds, as ZeroRedundancyOptimizer does; None if it holds none.

    Its step would call that optimizer's step. The inner optimizer's parameters and state are not replaced, so a trace
    would change the real ones.
    """
    for value in own_attributes(optimizer).values():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        for item in items:
            if isinstance(item, torch.optim.Optimizer) and item is not optimizer:
                return item
    return None


def run_on_stand_ins(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    groups: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    state: Mapping[Any, Any],
    attributes: Mapping[str, Tensor],
) -> dict[Any, Any]:
    """Step ``parameters``, which carry gradients, and return the state after it.

    Args:
        optimizer: unchanged afterwards.
        parameters: stand-ins for the parameters of all groups, in order.
        groups: the settings of each group, without "params".
        sizes: the number of parameters in each group.
        state: the state by stand-in, or by the optimizer's own keys.
        attributes: stand-ins for tensors that the optimizer holds as attributes.

    Raises:
        NotCompilableError: the step changes more than parameters and state.
    """
    groups_of_stand_ins, at = [], 0
    for size, settings in zip(sizes, groups, strict=True):
        own = list(parameters[at : at + size])
        groups_of_stand_ins.append({**settings, "params": own, **_device_step(settings)})
        at += size
    before = [dict(group) for group in groups_of_stand_ins]
    with compile_lock():  # a second trace would restore the stand-ins of the first
        attributes_before = {
            name: copy.copy(value) if isinstance(value, (list, dict, set)) else value
            for name, value in own_attributes(optimizer).items()
        }
        vars(optimizer).update(attributes)
        prints = {name: _identified(value) for name, value in own_attributes(optimizer).items()}
        own_groups, own_state = optimizer.param_groups, optimizer.state
        optimizer.param_groups, optimizer.state = groups_of_stand_ins, defaultdict(dict, state)
        try:
            with compiling_flag(), torch.no_grad():
                plain_step(optimizer)(optimizer)
            result = dict(optimizer.state)
            changed = [n for n, v in own_attributes(optimizer).items() if prints.get(n) != _identified(v)]
            pairs = zip(before, groups_of_stand_ins, strict=True)
            changed += [name for old, new in pairs for name in new if new[name] is not old.get(name)]
        finally:
            optimizer.param_groups, optimizer.state = own_groups, own_state
            for name in own_attributes(optimizer):
                if name not in attributes_before:
                    delattr(optimizer, name)
            vars(optimizer).update(attributes_before)
    if changed:
        raise NotCompilableError(f"its step replaces {changed[0]!r}, which is neither a parameter nor state")
    return result


def _identified(value: Any) -> Hashable:
    return id(value) if isinstance(value, Tensor) else fingerprint(value)


def _device_step(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that make torch's optimizers keep step counters on the device and use plain ops.

    ``foreach`` is off, because scalars of ops on tensor lists cannot be lifted, and the kernels are fused anyway.
    """
    forms = {"capturable": True, "fused": False, "foreach": False}
    return {name: value for name, value in forms.items() if name in settings}
