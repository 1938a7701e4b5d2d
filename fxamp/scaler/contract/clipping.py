"""The arithmetic of ``torch.nn.utils.clip_grad_norm_``, split so that another step can apply the coefficient."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fxamp.optim.shards import sum_over_ranks_
from fxamp.scaler.contract.gradient_check import Squares, check_group
from fxamp.scaler.contract.gradients import group_gradients
from fxamp.torch_devices import moved


def squares_of(parameters: Iterable[Tensor]) -> Squares:
    """Return the sums of squares of the parameters' gradients as stored; reads them all."""
    squares: Squares = []
    for group in group_gradients(parameters, by_spread=True):
        overflow, square = (torch.zeros((), dtype=torch.float32, device=group.device) for _ in range(2))
        check_group(group, None, overflow, square)
        squares.append((square, group.spread))
    return squares


def total_norm(squares: Squares, device: torch.device) -> Tensor:
    """Return the norm of all gradients, 0-dim float32 on ``device``.

    Of DTensors it is that of the whole gradients: a collective call, which all ranks must make.
    """
    total = torch.zeros((), dtype=torch.float32, device=device)
    for square, spread in squares:
        total.add_(moved(sum_over_ranks_(square, spread), device))
    return total.sqrt()


def flag_infinite_(flags: Iterable[Tensor], total_norm: Tensor) -> None:
    """Set each flag, 0-dim float32, if the norm is inf or NaN: the clip coefficient would then be invalid."""
    bad = torch.isfinite(total_norm).logical_not()
    for flag in flags:
        flag.masked_fill_(moved(bad, flag.device), 1.0)
