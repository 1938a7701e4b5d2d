"""The arithmetic of ``torch.nn.utils.clip_grad_norm_``, split so that another step can apply the coefficient."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fxamp.optim.shards import sum_over_ranks_
from fxamp.scaler.contract.gradients import check_group, group_gradients
from fxamp.torch_devices import moved


def norm_of(parameters: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of the parameters' gradients as stored: 0-dim float32 on ``device``; reads them all.

    Of DTensors it is that of the whole gradients: a collective call, which all ranks must make.
    """
    total = torch.zeros((), dtype=torch.float32, device=device)
    for group in group_gradients(parameters, by_spread=True):
        found, square = (torch.zeros((), dtype=torch.float32, device=group.device) for _ in range(2))
        check_group(group, None, found, square)
        total.add_(moved(sum_over_ranks_(square, group.spread), device))
    return total


def multiply_(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply the parameters' gradients by ``factor`` in place, in one foreach op for each device and dtype."""
    for group in group_gradients(parameters):
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in group.gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for members in by_dtype.values():
            torch._foreach_mul_(members, moved(factor, group.device))


def flag_infinite_(flags: Iterable[Tensor], total_norm: Tensor) -> None:
    """Set each flag, 0-dim float32, if the norm is inf or NaN: the clip coefficient would then be invalid."""
    bad = torch.isfinite(total_norm).logical_not()
    for flag in flags:
        flag.masked_fill_(moved(bad, flag.device), 1.0)
