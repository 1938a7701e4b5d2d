"""Any optimizer's own step, compiled so that a flag on the device skips it, without waiting for the device.

    step = guarded(optimizer, lowering="inductor")
    bound = step.prepare(scaled=True, clipped=False)      None: the host has to decide, the log says why
    bound(found_inf, Factors(inv_scale=inv_scale))        nothing waits for the device

How it is done, a module a step:

    layout         what the optimizer's next step will read; fingerprint: what of it a trace depends on
    complete       make tensors of what the step changes in the state
    borrow, trace  run the optimizer's own Python on fake tensors, and write down the ops
    lower          rewrite by the passes of :func:`fxamp.passes.sequences.step`, compile
    guarded_step   keep, choose and run what was compiled
    state_dicts    what is saved looks as if the optimizer had stepped alone

Bytes of memory traffic a parameter, float32 parameters, gradients and two states (Adam), as generated:

    the step, unscaling and clipping included              28    p, g, m, v read; p, m, v written
    check, or check with the norm, by the scaler alone      4    every gradient must be read before the first is used
    check, or check with the norm, in compiled backwards    0    so 28 in all; the norm needs ``graph_norm=True``
"""

import weakref
from threading import RLock

import torch

from fxamp.optim.guarded_step import BoundStep, Factors, GuardedStep, has_pre_hooks

__all__ = ["BoundStep", "Factors", "GuardedStep", "guarded", "has_pre_hooks"]

_steps: "weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[str, str | None], GuardedStep]]"
_steps = weakref.WeakKeyDictionary()
_making = RLock()


def guarded(optimizer: torch.optim.Optimizer, lowering: str = "inductor", mode: str | None = None) -> GuardedStep:
    """Return the optimizer's guarded step; the same one each time."""
    with _making:
        known = _steps.setdefault(optimizer, {})
        if (lowering, mode) not in known:
            known[lowering, mode] = GuardedStep(optimizer, lowering, mode)
        return known[lowering, mode]
