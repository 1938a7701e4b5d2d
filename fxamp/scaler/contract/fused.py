"""Optimizers that decide on the device whether to step: torch's fused optimizers, and others that support the protocol.

The protocol is torch's. A class with ``_step_supports_amp_scaling`` finds two attributes set while its ``step`` runs:
``self.grad_scale`` (divide the gradients by it; None: they are unscaled) and ``self.found_inf`` (nonzero: change
nothing). In an older form of the protocol, ``step`` takes the scaler: ``step(grad_scaler=...)``.
"""

import inspect
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from fxamp.scaler.contract.gradients import parameters_with_gradients


def decides_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step takes the overflow flag and skips on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step uses the older form of the protocol."""
    function = getattr(optimizer.step, "__func__", None)
    if function not in _takes_scaler:
        answer = "grad_scaler" in inspect.signature(optimizer.step).parameters
        if function is None:
            return answer
        _takes_scaler[function] = answer
    return _takes_scaler[function]


#: Cached per function: reading the signature takes longer than all other checks of a step.
_takes_scaler: "weakref.WeakKeyDictionary[Any, bool]" = weakref.WeakKeyDictionary()


def lacks_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the next step creates state for a parameter that has none.

    torch's fused SGD (2.11 to 2.15) allocates a momentum buffer in its first step. If that step is skipped, the buffer
    stays uninitialised, and later steps use it as momentum. So the host must decide on a skip before such a step is
    called. An SGD group with ``momentum`` 0 keeps no state.
    """
    stateless = {id(p) for group in optimizer.param_groups if group.get("momentum") == 0 for p in group["params"]}
    return any(
        id(parameter) not in stateless and not _has_values(optimizer.state.get(parameter))
        for parameter in parameters_with_gradients(optimizer)
    )


def _has_values(state: Any) -> bool:
    # Older versions of torch saved {"momentum_buffer": None} for SGD without momentum.
    values = state.values() if isinstance(state, dict) else [state]
    return any(value is not None for value in values)


def flag_device(optimizer: torch.optim.Optimizer, home: torch.device) -> torch.device:
    """Return where the step must find flag and scale: on the CPU if a parameter is there, else on ``home``.

    torch's steps move both to each parameter's device, and do not wait for a copy to the CPU to arrive.
    """
    at = {parameter.device.type for parameter in parameters_with_gradients(optimizer)}
    return torch.device("cpu") if "cpu" in at else home


def has_float16_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a gradient is float16: then only the step may unscale it, because the step does not round to float16."""
    return any(
        parameter.grad is not None and parameter.grad.dtype == torch.float16
        for parameter in parameters_with_gradients(optimizer)
    )


def step(
    optimizer: Any, found_inf: Tensor, scale: Tensor | None, first: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, bool | Tensor]:
    """Call the optimizer's step with the protocol's two attributes set; waits for the device only if ``first``.

    Args:
        optimizer: one that decides on the device.
        found_inf: 0-dim float32, nonzero to skip.
        scale: 0-dim float32 by which the gradients are still multiplied; None if they are unscaled.
        first: whether the step will create state, see :func:`lacks_state`.
        args, kwargs: for the optimizer's step.

    Returns:
        The step's return value, and whether it skipped: a bool, or ``found_inf`` if only the device knows.
    """
    skipped = bool(found_inf.item()) if first else found_inf
    if skipped is True:
        return None, True
    own = getattr(optimizer, "grad_scale", None)
    # Pass copies: an optimizer may keep or change them, and must not change the scaler's own tensors.
    optimizer.grad_scale = own if scale is None else scale * (1.0 if own is None else own)
    optimizer.found_inf = found_inf.clone()
    try:
        return optimizer.step(*args, **kwargs), skipped
    finally:
        del optimizer.grad_scale
        del optimizer.found_inf


def step_with_scaler(optimizer: Any, scaler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a step of the older form, which asks the scaler to unscale, check and decide."""
    warnings.warn(
        f"{type(optimizer).__name__}.step takes grad_scaler=, which torch has deprecated: "
        "read self.grad_scale and self.found_inf instead",
        FutureWarning,
        stacklevel=6,
    )
    return optimizer.step(*args, **kwargs, grad_scaler=scaler)
