"""Complete an optimizer's state before a compiled step: everything that the step changes becomes a device tensor.

Python numbers become 0-dim tensors, of int64 or, as in Python, float64. Step counters that torch keeps on the CPU move
to their parameter's device. The optimizer itself creates state entries, in its first step: it decides their initial
values (SGD's momentum is a copy of the gradient), and a skipped step must not create any.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxamp.optim.errors import MakesStateError, NotCompilableError, explaining_failures
from fxamp.optim.reading.layout import Layout
from fxamp.optim.tracing.trace import run_once, run_without_values
from fxamp.torch_devices import moved
from fxamp.torch_dtypes import widest_float

ROUNDS = 3
"""The maximum number of runs: usually the first run finds the numbers, and the second finds no others."""

Entries = dict[Any, dict[str, Any]]


def counters_as_tensors(optimizer: torch.optim.Optimizer, layout: Layout) -> Entries:
    """Return tensors for the numbers in the state that the step changes, by owner and name; changes nothing.

    Raises:
        MakesStateError: the step adds to the state.
        NotCompilableError: the step cannot be run on fake tensors.
    """
    changes: Entries = _counters_on_device(layout)
    for _ in range(ROUNDS):
        numbers = _changed_numbers(optimizer, _applied(layout, changes))
        if not numbers:
            return changes
        for owner, entry in numbers.items():
            changes.setdefault(owner, {}).update(entry)
    raise NotCompilableError("what it keeps in its state changes its kind from step to step")


def numbers_in(entry: Mapping[str, Any], changes: Mapping[str, Tensor]) -> dict[str, type[int] | type[float]]:
    """Return the names of an owner's numbers that ``changes`` replaces by tensors, and the types of the numbers."""
    return {
        name: float if tensor.is_floating_point() else int
        for name, tensor in changes.items()
        if isinstance(entry.get(name), (int, float))
    }


def _applied(layout: Layout, changes: Entries) -> Layout:
    state = {owner: dict(entry) for owner, entry in layout.state.items()}
    for owner, entry in changes.items():
        state.setdefault(owner, {}).update(entry)
    return replace(layout, state=state)


def _changed_numbers(optimizer: torch.optim.Optimizer, layout: Layout) -> Entries:
    """Run the step on fake tensors, and return tensors for the numbers that it changes."""
    tensors = layout.tensors()
    after = run_without_values(tensors, lambda fakes: run_once(optimizer, layout, fakes, layout.floats())).state
    numbers: Entries = {}
    for owner, entry in after.items():
        if not isinstance(entry, dict):
            raise NotCompilableError("its state is not a dict for each parameter")
        known = layout.state.get(owner, {})
        for name, value in entry.items():
            if name not in known or (known[name] is None and value is not None):
                raise MakesStateError(f"it makes {name!r} of the state")
            _require_same_kind(name, known[name], value)
            with explaining_failures():  # a number that was read from a tensor cannot be compared
                number = _number(name, known[name], value, owner)
            if number is not None:
                numbers.setdefault(owner, {})[name] = number
    return numbers


def _require_same_kind(name: str, before: Any, after: Any) -> None:
    """Refuse integers that become floats or the reverse: a compiled step writes each tensor's new value into it."""
    if not isinstance(before, Tensor) or not isinstance(after, (Tensor, float)):
        return
    if before.is_floating_point() != (isinstance(after, float) or after.is_floating_point()):
        raise NotCompilableError(f"{name!r} of its state changes its dtype from step to step")


def _number(name: str, before: Any, after: Any, owner: Any) -> Tensor | None:
    """Return a tensor for a number that the step changes; None if no replacement is needed."""
    if isinstance(before, Tensor) or (not isinstance(after, Tensor) and (before is after or before == after)):
        return None
    if isinstance(before, (int, float)) and not isinstance(before, bool):
        device = owner.device if isinstance(owner, Tensor) else torch.device("cpu")
        dtype = torch.int64 if isinstance(before, int) and isinstance(after, int) else widest_float(device)
        return torch.full((), before, dtype=dtype, device=device)
    raise NotCompilableError(f"its step changes {name!r} of the state, which is a {type(before).__name__}")


def _counters_on_device(layout: Layout) -> Entries:
    counters: Entries = {}
    for owner, entry in layout.state.items():
        for name, value in entry.items():
            if not isinstance(owner, Tensor) or not isinstance(value, Tensor) or value.dim() or not value.is_cpu:
                continue
            if owner.device.type != "cpu":
                counters.setdefault(owner, {})[name] = moved(value, owner.device)
    return counters
