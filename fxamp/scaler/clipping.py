"""The arithmetic of ``clip_grad_norm_``, as torch.nn.utils has it, without a pass over the gradients."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fxamp.errors import OptionError
from fxamp.scaler.checks import check_group, group_gradients


def require_max_norm(max_norm: float) -> None:
    """Raise OptionError unless ``max_norm`` is a number that is not negative."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or math.isnan(max_norm) or max_norm < 0:
        raise OptionError(f"clip_grad_norm_: max_norm={max_norm!r}: expected a number that is not negative")


def coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied by: ``min(max_norm / (total_norm + 1e-6), 1)``, 0-dim float32."""
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def norm_of(parameters: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of the parameters' gradients as they are: 0-dim float32 on ``device``; reads them all."""
    total = torch.zeros((), dtype=torch.float32, device=device)
    for group in group_gradients(parameters):
        found, square = (torch.zeros((), dtype=torch.float32, device=group.device) for _ in range(2))
        check_group(group, None, found, square)
        total.add_(square.to(device, non_blocking=True))
    return total


def multiply_(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply the parameters' gradients by ``factor`` in place, in one foreach op for each device and dtype."""
    for group in group_gradients(parameters):
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in group.gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for members in by_dtype.values():
            torch._foreach_mul_(members, factor.to(group.device, non_blocking=True))


def flag_infinite_(flags: Iterable[Tensor], total_norm: Tensor) -> None:
    """Set flags, 0-dim float32 each, if the norm is inf or NaN: a coefficient made of it would spoil the step."""
    bad = torch.isfinite(total_norm).logical_not()
    for flag in flags:
        flag.masked_fill_(bad.to(flag.device, non_blocking=True), 1.0)
