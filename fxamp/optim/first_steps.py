"""The first step of each optimizer that fxamp takes part in, told to whoever checks then that training is as asked."""

import weakref
from collections.abc import Callable

import torch

Check = Callable[[torch.optim.Optimizer], None]

_checks: list[Check] = []
_checked: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()


def on_first_step(check: Check) -> Check:
    """Call ``check`` with each optimizer once, after its first step from now on that fxamp takes part in."""
    _checks.append(check)
    return check


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """Take note of a step, skipped or not, in which a scaler, a compiled step or a plugin of fxamp took part."""
    if not _checks or optimizer in _checked:
        return
    _checked.add(optimizer)
    for check in _checks:
        check(optimizer)
