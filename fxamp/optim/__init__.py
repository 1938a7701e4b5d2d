"""Compile any optimizer's step so that a flag on the device can skip it, without waiting for the device.

    compiled = CompiledOptimizer.of(optimizer)
    bound = compiled.prepare(StepOptions(scaled=True))      None if the host must decide; the log says why
    bound(found_inf, Factors(inv_scale=inv_scale))          never waits for the device

    compile_optimizer(optimizer)                            the same for optimizer.step(), without a scaler

``fxamp/optim/README.md`` lists the folders, and shows how a step passes from file to file.
"""

from fxamp.optim.bound_step import BoundStep, Factors, has_pre_hooks, own_step, run_pre_hooks
from fxamp.optim.compiled_optimizer import CompiledOptimizer
from fxamp.optim.precision.state_dicts import packed_state_dict
from fxamp.optim.programs.lowering import StepOptions
