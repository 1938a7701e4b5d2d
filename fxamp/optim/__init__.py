"""Compile any optimizer's step so that a flag on the device can skip it, without waiting for the device.

    step = guarded(optimizer, lowering="inductor")
    bound = step.prepare(scaled=True, clipped=False)      None: the host must decide, and the log says why
    bound(found_inf, Factors(inv_scale=inv_scale))        never waits for the device

    compile_optimizer(optimizer)                          the same for optimizer.step(), without a scaler

The modules, in order of use:

    layout           what the optimizer's next step will read; fingerprint: which of its properties a trace depends on
    shards           of DTensors, the parts that this rank steps, and sums that need the other ranks
    complete         turn the numbers in the state that the step changes into tensors
    slices, kinds    group the parameters that one pointwise program can step, whatever their shapes
    share            find the kinds whose programs are one, but for the numbers that it is given
    borrow, trace    run the optimizer's own Python code on fake tensors, and record the ops
    lower            rewrite with the passes of :func:`fxamp.passes.sequences.step`, then compile
    kind_step        the same for kinds that share one: a generated kernel, or Inductor's code for one flat parameter
    step_parts       compile one step: a part for each set of kinds, and one for all other parameters
    bound_step       run a compiled step on the tensors and settings of one call
    guarded_step     decide, cache and select; registry: one cache for each optimizer
    signs            find the states that never become negative
    packed           tensors in fewer bits; precision: which of them a policy's ``[optimizer]`` asks for
    state_dicts      save the state in the form that the uncompiled optimizer saves

Bytes of memory traffic per parameter, for float32 parameters, gradients and two states (Adam), from the generated code:

    the step, unscaling and clipping included              28    p, g, m, v read; p, m, v written
    check, or check with the norm, by the scaler alone      4    every gradient must be read before the first is used
    check, or check with the norm, in compiled backwards    0    so 28 in all; the norm needs ``graph_norm=True``
"""

from fxamp.optim.bound_step import BoundStep, Factors, has_pre_hooks
from fxamp.optim.compile_optimizer import clips
from fxamp.optim.guarded_step import GuardedStep
from fxamp.optim.precision.state_dicts import packed_state_dict
from fxamp.optim.registry import guarded

__all__ = ["BoundStep", "Factors", "GuardedStep", "clips", "guarded", "has_pre_hooks", "packed_state_dict"]
