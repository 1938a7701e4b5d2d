"""Compile any optimizer's step so that a flag on the device can skip it, without waiting for the device.

    step = guarded(optimizer, lowering="inductor")
    bound = step.prepare(scaled=True, clipped=False)      None: the host must decide, and the log says why
    bound(found_inf, Factors(inv_scale=inv_scale))        never waits for the device

    compile_optimizer(optimizer)                          the same for optimizer.step(), without a scaler

``fxamp/optim/README.md`` lists the folders, and draws the way of a step from file to file.
"""

from fxamp.optim.bound_step import BoundStep, Factors, has_pre_hooks
from fxamp.optim.compile_optimizer import clips
from fxamp.optim.guarded_step import GuardedStep, guarded
from fxamp.optim.precision.state_dicts import packed_state_dict
