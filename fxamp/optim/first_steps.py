"""Run checks after the first step of each optimizer that fxamp takes part in."""

import weakref
from collections.abc import Callable

import torch

Check = Callable[[torch.optim.Optimizer], None]

_checks: list[Check] = []
_checked: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()


def on_first_step(check: Check) -> Check:
    """Register ``check``: it is called once with each optimizer, after the next first step that uses fxamp."""
    _checks.append(check)
    return check


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """Record a step, skipped or not, that used a scaler, a compiled step or a plugin of fxamp."""
    if not _checks or optimizer in _checked:
        return
    _checked.add(optimizer)
    for check in _checks:
        check(optimizer)
