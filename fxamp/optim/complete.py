"""Complete an optimizer's state before its first compiled step: make what that step would make, as tensors.

Compiled steps take all state as tensors, and write to them. So entries that the first step makes are allocated now
(their values do not matter: ``born`` says that they are not there yet), counters that are Python numbers become 0-dim
tensors, and step counters that torch keeps on the CPU move to their parameter's device.
"""

from typing import Any

import torch
from torch import Tensor

from fxamp.optim.borrow import RefusedError
from fxamp.optim.layout import SAME, Layout, Origin
from fxamp.optim.trace import fake_mode, fakes_of, refusing, run_once

ROUNDS = 4
"""Runs until nothing new comes up: one makes entries, one shows which numbers count, one finds nothing."""

Entries = dict[Any, dict[str, Any]]


def complete_state(optimizer: torch.optim.Optimizer, layout: Layout) -> tuple[Entries, dict[Any, Origin]]:
    """Return the entries that have to be added or replaced, and what the owners that are new or grow had before.

    Nothing is changed. Raises RefusedError if the step cannot be run on fake tensors.
    """
    changes: Entries = _moved(layout)
    origins: dict[Any, Origin] = {}
    for _ in range(ROUNDS):
        found = _missing(optimizer, _applied(layout, changes))
        if not found:
            return changes, origins
        for owner, entry in found.items():
            known = layout.state.get(owner, {})
            if any(name not in known or known[name] is None for name in entry):
                origins[owner] = {
                    n: SAME if _becomes_tensor(n, v, entry, changes.get(owner, {})) else v for n, v in known.items()
                }
            changes.setdefault(owner, {}).update(entry)
    raise RefusedError("its state keeps growing")


def _becomes_tensor(name: str, value: Any, *entries: dict[str, Any]) -> bool:
    return isinstance(value, Tensor) or (value is not None and any(isinstance(e.get(name), Tensor) for e in entries))


def _applied(layout: Layout, changes: Entries) -> Layout:
    state = {owner: dict(entry) for owner, entry in layout.state.items()}
    for owner, entry in changes.items():
        state.setdefault(owner, {}).update(entry)
    return Layout(layout.parameters, layout.gradients, layout.settings, state, {}, layout.attributes)


def _missing(optimizer: torch.optim.Optimizer, layout: Layout) -> Entries:
    """Run the step on fakes, and return what it makes or counts that the layout does not hold as a tensor."""
    mode = fake_mode()
    fakes = fakes_of(layout.tensors(), mode)
    with mode, torch.no_grad(), refusing():
        _, after = run_once(optimizer, layout, fakes, layout.floats(), first=False)
    found: Entries = {}
    for owner, entry in after.items():
        if not isinstance(entry, dict):
            raise RefusedError("its state is not a dict for each parameter")
        known = layout.state.get(owner, {})
        for name, value in entry.items():
            made = _made(name, value, known, owner)
            if made is not None:
                found.setdefault(owner, {})[name] = made[0]
    return found


def _made(name: str, value: Any, known: dict[str, Any], owner: Any) -> tuple[Any] | None:
    """The real value to put in place, in a tuple; None if what is there will do."""
    before = known.get(name)
    if isinstance(value, Tensor):
        if isinstance(before, Tensor):
            return None
        device = owner.device if isinstance(owner, Tensor) and value.dim() == 0 else value.device
        memory = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return (memory.zero_(),)
    if name not in known:
        return (value,)
    if isinstance(before, Tensor) or before is value or before == value:
        return None
    if isinstance(before, (int, float)) and not isinstance(before, bool):
        device = owner.device if isinstance(owner, Tensor) else torch.device("cpu")
        dtype = torch.int64 if isinstance(before, int) and isinstance(value, int) else torch.float32
        return (torch.full((), before, dtype=dtype, device=device),)
    raise RefusedError(f"its step changes {name!r} of the state, which is a {type(before).__name__}")


def _moved(layout: Layout) -> Entries:
    moved: Entries = {}
    for owner, entry in layout.state.items():
        for name, value in entry.items():
            if not isinstance(owner, Tensor) or not isinstance(value, Tensor) or value.dim() or not value.is_cpu:
                continue
            if owner.device.type != "cpu":
                moved.setdefault(owner, {})[name] = value.to(owner.device, non_blocking=True)
    return moved
