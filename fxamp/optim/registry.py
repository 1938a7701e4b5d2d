"""Each optimizer's compiled step: created once; does not keep the optimizer alive."""

import weakref
from threading import RLock

import torch

from fxamp.optim.guarded_step import GuardedStep

_steps: "weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[str, str | None], GuardedStep]]"
_steps = weakref.WeakKeyDictionary()
_making = RLock()


def guarded(optimizer: torch.optim.Optimizer, lowering: str = "inductor", mode: str | None = None) -> GuardedStep:
    """Return the optimizer's guarded step; the same object each time."""
    with _making:
        known = _steps.setdefault(optimizer, {})
        if (lowering, mode) not in known:
            known[lowering, mode] = GuardedStep(optimizer, lowering, mode)
        return known[lowering, mode]
