"""Optimizers that decide on the device whether to step: torch's fused ones, and others marked as they are.

The protocol is torch's: a class with ``_step_supports_amp_scaling`` finds ``self.grad_scale`` (divide the gradients by
it; None: they are true already) and ``self.found_inf`` (nonzero: change nothing) while its ``step`` runs. An older form
of it takes the scaler itself, as ``step(grad_scaler=...)``.
"""

import inspect
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from fxamp.scaler.checks import parameters_with_gradients


def decides_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step takes the flag and skips on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step follows the older form of the protocol."""
    function = getattr(optimizer.step, "__func__", None)
    if function not in _takes_scaler:
        answer = "grad_scaler" in inspect.signature(optimizer.step).parameters
        if function is None:
            return answer
        _takes_scaler[function] = answer
    return _takes_scaler[function]


#: By function, as asking for a signature takes longer than all else that a step asks.
_takes_scaler: "weakref.WeakKeyDictionary[Any, bool]" = weakref.WeakKeyDictionary()


def lacks_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the coming step makes state for a parameter that has none.

    torch's fused SGD (2.11 to 2.15) allocates a momentum buffer in its first step, leaves it unwritten if that step is
    skipped, and later takes it for a momentum. So a skip has to be decided before such a step is called. A group whose
    ``momentum`` is 0 is SGD's way to keep no state at all.
    """
    stateless = {id(p) for group in optimizer.param_groups if group.get("momentum") == 0 for p in group["params"]}
    return any(
        id(parameter) not in stateless and not _has_values(optimizer.state.get(parameter))
        for parameter in parameters_with_gradients(optimizer)
    )


def _has_values(state: Any) -> bool:
    # Older torch saved {"momentum_buffer": None} for SGD without momentum.
    values = state.values() if isinstance(state, dict) else [state]
    return any(value is not None for value in values)


def has_float16_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a gradient is float16: only the step itself may divide it, which does not round it to float16."""
    return any(
        parameter.grad is not None and parameter.grad.dtype == torch.float16
        for parameter in parameters_with_gradients(optimizer)
    )


def step(
    optimizer: Any, found_inf: Tensor, scale: Tensor | None, first: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, bool | Tensor]:
    """Call the optimizer's step with its two attributes lent to it; waits for the device only in a first step.

    Args:
        optimizer: one that decides on the device.
        found_inf: 0-dim float32, nonzero to skip.
        scale: 0-dim float32 that its gradients still hold as a factor; None if they are true.
        first: whether the step will make state, see :func:`lacks_state`.
        args, kwargs: for the optimizer's step.

    Returns:
        What the step returned, and whether it skipped: a bool, or ``found_inf`` where only the device knows.
    """
    skipped = bool(found_inf.item()) if first else found_inf
    if skipped is True:
        return None, True
    own = getattr(optimizer, "grad_scale", None)
    # Copies: what an optimizer keeps or changes must not be the scaler's own tensors.
    optimizer.grad_scale = own if scale is None else scale * (1.0 if own is None else own)
    optimizer.found_inf = found_inf.clone()
    try:
        return optimizer.step(*args, **kwargs), skipped
    finally:
        del optimizer.grad_scale
        del optimizer.found_inf


def step_with_scaler(optimizer: Any, scaler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a step of the older form, which unscales, checks and decides by asking the scaler."""
    warnings.warn(
        f"{type(optimizer).__name__}.step takes grad_scaler=, a form that torch is giving up: "
        "read self.grad_scale and self.found_inf instead",
        FutureWarning,
        stacklevel=6,
    )
    return optimizer.step(*args, **kwargs, grad_scaler=scaler)
