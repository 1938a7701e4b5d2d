"""Run an optimizer's own step on other tensors: replace its parameters, gradients and state, then restore them."""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxamp.optim.reading.fingerprint import fingerprint
from fxamp.torch_private import compile_lock, compiling_flag

#: Attributes of every optimizer; a step's result does not depend on them.
COMMON = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))) | {"_opt_called", "step", "grad_scale", "found_inf"}


class RefusedError(Exception):
    """A step cannot be compiled so that the device can skip it; the message says why. Never reaches the user."""


class MakesStateError(Exception):
    """A step creates state, which only the optimizer itself can do; the message says what. Never reaches the user."""


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes that this optimizer has besides those of every optimizer."""
    return {name: value for name, value in vars(optimizer).items() if name not in COMMON}


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """Return the class's own step, without the wrapper that torch adds for hooks and the profiler."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def needs_arguments(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step has required arguments: LBFGS's needs a closure."""
    _, *parameters = inspect.signature(plain_step(optimizer)).parameters.values()
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return any(each.default is each.empty and each.kind not in kinds for each in parameters)


def replaced_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step`` is not the class's step; the counting wrapper of schedulers does not count."""
    own = vars(optimizer).get("step")
    return own is not None and inspect.unwrap(own) is not inspect.unwrap(type(optimizer).step)


def wrapped_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return an optimizer that ``optimizer`` holds, as ZeroRedundancyOptimizer does; None if it holds none.

    Its step would call that optimizer's step. The inner optimizer's parameters and state are not replaced, so a trace
    would change the real ones.
    """
    held = [value for name, value in vars(optimizer).items() if name not in COMMON]
    for value in held:
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        for item in items:
            if isinstance(item, torch.optim.Optimizer) and item is not optimizer:
                return item
    return None


def run_borrowed(
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
        RefusedError: the step changes more than parameters and state.
    """
    borrowed, at = [], 0
    for size, settings in zip(sizes, groups, strict=True):
        borrowed.append({**settings, "params": list(parameters[at : at + size]), **_device_step(settings)})
        at += size
    before = [dict(group) for group in borrowed]
    with compile_lock():  # a second trace would restore the stand-ins of the first
        kept = {
            name: copy.copy(value) if isinstance(value, (list, dict, set)) else value
            for name, value in own_attributes(optimizer).items()
        }
        vars(optimizer).update(attributes)
        prints = {name: _identified(value) for name, value in own_attributes(optimizer).items()}
        own_groups, own_state = optimizer.param_groups, optimizer.state
        optimizer.param_groups, optimizer.state = borrowed, defaultdict(dict, state)
        try:
            with compiling_flag(), torch.no_grad():
                plain_step(optimizer)(optimizer)
            result = dict(optimizer.state)
            changed = [n for n, v in own_attributes(optimizer).items() if prints.get(n) != _identified(v)]
            changed += [k for old, new in zip(before, borrowed, strict=True) for k in new if new[k] is not old.get(k)]
        finally:
            optimizer.param_groups, optimizer.state = own_groups, own_state
            for name in own_attributes(optimizer):
                if name not in kept:
                    delattr(optimizer, name)
            vars(optimizer).update(kept)
    if changed:
        raise RefusedError(f"its step replaces {changed[0]!r}, which is neither a parameter nor state")
    return result


def _identified(value: Any) -> Hashable:
    return id(value) if isinstance(value, Tensor) else fingerprint(value)


def _device_step(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that make torch's optimizers keep step counters on the device and use plain ops.

    ``foreach`` is off: the scalars of ops on lists of tensors cannot be lifted, and the kernels are fused anyway.
    """
    forms = {"capturable": True, "fused": False, "foreach": False}
    return {name: value for name, value in forms.items() if name in settings}
