"""Run a step whose gradients are checked, in the way that ``step_plan.py`` chose."""

import warnings
from typing import Any, Protocol

import torch
from torch import Tensor

from fxamp.optim import BoundStep, CompiledOptimizer, Factors, StepOptions, has_pre_hooks, own_step, run_pre_hooks
from fxamp.scaler.torch_contract.optimizer_record import OptimizerRecord
from fxamp.scaler.torch_contract.step_plan import StepCall, StepPlan
from fxamp.torch_devices import moved


class HostDecides(Protocol):
    """The part of a scaler that steps, and waits for the flag."""

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: OptimizerRecord, *args: Any, **kwargs: Any) -> Any: ...


def run_step(
    plan: StepPlan, call: StepCall, scaler: HostDecides, scale: Tensor, inv_scale: Tensor | None
) -> tuple[Any, bool | Tensor]:
    """Run a step as planned.

    ``scale``: 0-dim float32. ``inv_scale``: 1 / scale, if gradients in memory hold the scale; None if they do not.

    Returns:
        The step's return value, and whether it skipped: a bool, or a flag, 0-dim float32, if only the device knows.
    """
    if plan.compiled is not None and plan.options is not None:
        return _run_compiled(plan.compiled, plan.options, call, inv_scale)
    if plan.way == "fused":
        return _run_fused(call, scale, inv_scale is not None, plan.first)
    if plan.way == "older":
        value = _run_older(call, scaler)
        return value, call.record.found_inf(scale.device)
    if not call.record.found_inf_per_device:
        raise AssertionError("No inf checks were recorded for this optimizer.")
    value = scaler._maybe_opt_step(call.optimizer, call.record, *call.args, **call.kwargs)
    return value, call.record.skipped


def _run_compiled(
    step: BoundStep, options: StepOptions, call: StepCall, inv_scale: Tensor | None
) -> tuple[Any, bool | Tensor]:
    """Run the hooks before the step, then the step as they leave it; wait for the flag if that runs uncompiled."""
    device = call.gradients.parameters[0].device
    overflow = call.record.found_inf(device)
    if has_pre_hooks(call.optimizer):
        run_pre_hooks(call.optimizer)
        again = CompiledOptimizer.of(call.optimizer).prepare(options)
        if again is None:
            skipped = bool(overflow.item())
            return None if skipped else own_step(call.optimizer), skipped
        step = again
    inverse, coefficient = (
        None if factor is None else moved(factor, device) for factor in (inv_scale, call.record.coefficient)
    )
    step(overflow, Factors(inverse, coefficient))
    return None, overflow


def _run_fused(call: StepCall, scale: Tensor, scaled: bool, first: bool) -> tuple[Any, bool | Tensor]:
    """Call the step with ``grad_scale`` and ``found_inf`` set; waits for the device only if ``first``.

    torch's steps move both to each parameter's device, and do not wait for a copy to the CPU to arrive: so both are on
    the CPU if a parameter is there.
    """
    optimizer: Any = call.optimizer
    on_cpu = "cpu" in [place.type for place in call.record.found_inf_per_device]
    device = torch.device("cpu") if on_cpu else scale.device
    overflow = call.record.found_inf(device)
    skipped = bool(overflow.item()) if first else overflow
    if skipped is True:
        return None, True
    own = getattr(optimizer, "grad_scale", None)
    # Pass copies: an optimizer may keep or change them, and must not change the scaler's own tensors.
    optimizer.grad_scale = moved(scale, device) * (1.0 if own is None else own) if scaled else own
    optimizer.found_inf = overflow.clone()
    # If the step raises, some gradients may be unscaled and others not.
    call.record.half_unscaled = type(optimizer).__name__ if scaled else ""
    try:
        value = optimizer.step(*call.args, **call.kwargs)
    finally:
        del optimizer.grad_scale
        del optimizer.found_inf
    call.record.half_unscaled = ""
    return value, skipped


def _run_older(call: StepCall, scaler: HostDecides) -> Any:
    """Call a step of the older form of the protocol, which asks the scaler to unscale, check and decide."""
    optimizer: Any = call.optimizer
    warnings.warn(
        f"{type(optimizer).__name__}.step takes grad_scaler=, which torch has deprecated: "
        "read self.grad_scale and self.found_inf instead",
        FutureWarning,
        stacklevel=6,
    )
    return optimizer.step(*call.args, **call.kwargs, grad_scaler=scaler)
