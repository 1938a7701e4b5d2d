"""The arithmetic of ``torch.nn.utils.clip_grad_norm_``, split so that a compiled step can apply the coefficient."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fxamp.errors import OptionError
from fxamp.kernels import check_
from fxamp.kernels.gradient_request import Tables
from fxamp.optim.gradients import Gradients
from fxamp.optim.shards import Spread, all_plain, sum_over_ranks_
from fxamp.torch_devices import moved

Squares = list[tuple[Tensor, Spread]]
"""Sums of squares of gradients, 0-dim float32, and how the gradients of each are split between ranks."""


def require_max_norm(max_norm: float, name: str = "clip_grad_norm_: max_norm") -> None:
    """Raise OptionError unless ``max_norm`` is a non-negative number; the message calls it ``name``."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or math.isnan(max_norm) or max_norm < 0:
        raise OptionError(f"{name}={max_norm!r}: expected a non-negative number")


def coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the clip coefficient: ``min(max_norm / (norm + 1e-6), 1)``, 0-dim float32."""
    return torch.clamp((norm + 1e-6).reciprocal() * max_norm, max=1.0)  # as torch divides a number by a tensor


def norm_of(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], tables: Tables, addresses: list[int] | None = None
) -> Tensor:
    """Return the norm of the gradients of a step's parameters, 0-dim float32 on their one device, without a host sync.

    For DTensors it is the norm of the whole gradients: a collective call, which all ranks must make.

    Args:
        parameters: all that a step updates.
        gradients: their gradients, for DTensors this rank's part, laid out as the parameter.
        tables: the caller's cache, for gradients with the same layout in every call.
        addresses: the gradients' data pointers, if the caller has read them already.
    """
    device = parameters[0].device
    if not all_plain(parameters):
        return total_norm(squares_of(parameters), device)
    if not gradients:
        return torch.zeros((), dtype=torch.float32, device=device)
    square = torch.empty((), dtype=torch.float32, device=device)
    check_(gradients, None, squared_norm=square, tables=tables, addresses=addresses)
    return square.sqrt()


def squares_of(parameters: Sequence[Tensor]) -> Squares:
    """Return the sums of squares of the parameters' gradients as stored; reads them all."""
    squares: Squares = []
    for group in Gradients(parameters).groups(by_spread=True):
        square = torch.zeros((), dtype=torch.float32, device=group.device)
        if group.gradients:
            check_(group.gradients, None, squared_norm=square)
        squares.append((square, group.spread))
    return squares


def total_norm(squares: Squares, device: torch.device) -> Tensor:
    """Return the norm of all gradients, 0-dim float32 on ``device``.

    For DTensors it is the norm of the whole gradients: a collective call, which all ranks must make.
    """
    total = torch.zeros((), dtype=torch.float32, device=device)
    for square, spread in squares:
        total.add_(moved(sum_over_ranks_(square, spread), device))
    return total.sqrt()


def flag_infinite_(flags: Iterable[Tensor], norm: Tensor) -> None:
    """Set each flag, 0-dim float32, if the norm is inf or NaN: the clip coefficient would then be invalid."""
    bad = torch.isfinite(norm).logical_not()
    for flag in flags:
        flag.masked_fill_(moved(bad, flag.device), 1.0)
