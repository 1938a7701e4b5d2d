"""Run an optimizer's own step on other tensors: replace its parameters, gradients and state, then restore them."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import SymFloat, Tensor

from fxamp.optim.errors import CountsError, MakesStateError, NotCompilableError
from fxamp.optim.reading.fingerprint import own_attributes
from fxamp.optim.reading.layout import is_number
from fxamp.optim.tracing.python_state import PythonState, alike
from fxamp.optim.tracing.symbolic_math import symbolic_math
from fxamp.torch_private import compile_lock, compiled_as_written, compiling_flag

Counts = frozenset[tuple[int, str]]
"""Settings to which a step adds one, as ``group["step"] += 1`` does: the index of the group, and the name."""


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
    counted: frozenset[str] = frozenset(),
) -> tuple[dict[Any, Any], Counts]:
    """Step ``parameters``, which carry gradients; return the state after it, and the settings that it counted in.

    Args:
        optimizer: unchanged afterwards.
        parameters: stand-ins for the parameters of all groups, in order.
        groups: the settings of each group, without "params".
        sizes: the number of parameters in each group.
        state: the state by stand-in, or by the optimizer's own keys.
        attributes: stand-ins for tensors that the optimizer holds as attributes.
        counted: the names of settings to which the step may add one.

    Raises:
        CountsError: it adds one to other settings.
        MakesStateError: it makes settings.
        NotCompilableError: it changes more than parameters, state and such settings.
    """
    remaining = iter(parameters)
    groups_of_stand_ins = [
        {**settings, "params": list(islice(remaining, size)), **_device_step(optimizer, settings)}
        for size, settings in zip(sizes, groups, strict=True)
    ]
    with compile_lock():  # a second trace would restore the stand-ins of the first
        attributes_before = own_attributes(optimizer)
        inside = PythonState(attributes_before, *groups_of_stand_ins, *state.values())
        vars(optimizer).update(attributes)
        before = [own_attributes(optimizer), *map(dict, groups_of_stand_ins)]
        own_groups, own_state = optimizer.param_groups, optimizer.state
        optimizer.param_groups, optimizer.state = groups_of_stand_ins, defaultdict(dict, state)
        try:
            with compiling_flag(), compiled_as_written(), symbolic_math(), torch.no_grad():
                plain_step(optimizer)(optimizer)
            result = dict(optimizer.state)
        finally:
            changed = inside.restore()
            after = [own_attributes(optimizer), *groups_of_stand_ins]
            optimizer.param_groups, optimizer.state = own_groups, own_state
            for name in own_attributes(optimizer):
                if name not in attributes_before:
                    delattr(optimizer, name)
            vars(optimizer).update(attributes_before)
    (attributes_then, *groups_then), (attributes_now, *groups_now) = before, after
    _require_same(attributes_then, attributes_now)
    counts = _counts(groups_then, groups_now)
    if others := {name for _, name in counts} - counted:
        raise CountsError(frozenset(others))
    if changed:
        raise NotCompilableError(f"its step changes what {changed[0]!r} holds, which is neither a parameter nor state")
    return result, counts


def _require_same(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name in {**before, **after}:
        if name not in before or name not in after or not alike(before[name], after[name]):
            raise NotCompilableError(f"its step replaces {name!r}, which is neither a parameter nor state")


def _counts(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Counts:
    """Return the settings to which the step added one; the others must be as they were."""
    counts = set()
    for at, (then, now) in enumerate(zip(before, after, strict=True)):
        if new := now.keys() - then.keys():
            raise MakesStateError(f"it makes the settings {', '.join(sorted(new))}")
        counts |= {(at, name) for name, value in now.items() if _is_next(then[name], value)}
        _require_same({**then, **{name: now[name] for group, name in counts if group == at}}, now)
    return frozenset(counts)


def _is_next(before: Any, after: Any) -> bool:
    """Whether a number, possibly symbolic, is one more than another."""
    if isinstance(before, SymFloat) and isinstance(after, SymFloat):
        difference = after.node.expr - before.node.expr
        return bool(difference.is_number) and float(difference) == 1
    return is_number(before) and is_number(after) and bool(after - before == 1)


def _device_step(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that make torch's optimizers keep step counters on the device and use plain ops.

    ``foreach`` of others stays, because their code for lists can differ from that for single tensors.
    """
    forms = {"capturable": True, "fused": False}
    if plain_step(optimizer).__module__.startswith("torch.optim."):
        forms["foreach"] = False
    return {name: value for name, value in forms.items() if name in settings}
