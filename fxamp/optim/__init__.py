"""Any optimizer's own step, compiled so that a flag on the device skips it, without waiting for the device.

    step = guarded(optimizer, lowering="inductor")
    bound = step.prepare(scaled=True, clipped=False)      None: the host has to decide, the log says why
    bound(found_inf, Factors(inv_scale=inv_scale))        nothing waits for the device

    compile_optimizer(optimizer)                          the same for optimizer.step(), without a scaler

How it is done, a module a step:

    layout           what the optimizer's next step will read; fingerprint: what of it a trace depends on
    complete         make tensors of what the step changes in the state
    slices, kinds    which parameters are stepped by one and the same pointwise program, whatever their shapes
    borrow, trace    run the optimizer's own Python on fake tensors, and write down the ops
    lower            rewrite by the passes of :func:`fxamp.passes.sequences.step`, compile
    kind_step        the same for one kind: a generated kernel, or Inductor's code for one flat parameter
    guarded_step     keep, choose and run what was compiled; registry: one of them for each optimizer
    state_dicts      what is saved looks as if the optimizer had stepped alone

Bytes of memory traffic a parameter, float32 parameters, gradients and two states (Adam), as generated:

    the step, unscaling and clipping included              28    p, g, m, v read; p, m, v written
    check, or check with the norm, by the scaler alone      4    every gradient must be read before the first is used
    check, or check with the norm, in compiled backwards    0    so 28 in all; the norm needs ``graph_norm=True``
"""

from fxamp.optim.compile_optimizer import clips
from fxamp.optim.guarded_step import BoundStep, Factors, GuardedStep, has_pre_hooks
from fxamp.optim.registry import guarded

__all__ = ["BoundStep", "Factors", "GuardedStep", "clips", "guarded", "has_pre_hooks"]
