"""Clipping inside a compiled step: the arithmetic of ``torch.nn.utils.clip_grad_norm_`` on one coefficient.

The norm that ``GradScaler.clip_grad_norm_`` reads is in ``fxamp/scaler/contract/clipping.py``.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxamp.errors import OptionError
from fxamp.kernels import check_
from fxamp.kernels.gradient_request import Tables
from fxamp.optim.shards import all_plain, local, settle_gradient, spread_of, spreads_of, sum_over_ranks_


def require_max_norm(max_norm: float, name: str = "clip_grad_norm_: max_norm") -> None:
    """Raise OptionError unless ``max_norm`` is a non-negative number; the message calls it ``name``."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or math.isnan(max_norm) or max_norm < 0:
        raise OptionError(f"{name}={max_norm!r}: expected a non-negative number")


def coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """Return the clip coefficient: ``min(max_norm / (total_norm + 1e-6), 1)``, 0-dim float32."""
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


@torch.no_grad()
def squared_norm(parameters: Sequence[Tensor], gradients: Sequence[Tensor], tables: Tables) -> Tensor:
    """Return the sum of squares of the gradients, 0-dim float32 on their one device; waits for no device.

    Of DTensors it is that of the whole gradients: a collective call, which all ranks must make.

    Args:
        parameters: all that a step updates.
        gradients: theirs, of DTensors this rank's part, laid out as the parameter.
        tables: kept by the caller for gradients that look alike in every call.
    """
    total = torch.zeros((), dtype=torch.float32, device=parameters[0].device)
    if all_plain(parameters):
        if gradients:
            check_(gradients, None, squared_norm=total, tables=tables)
        return total
    for spread in spreads_of(parameters):
        square = torch.zeros_like(total)
        parts = (local(settle_gradient(parameter)) for parameter in parameters if spread_of(parameter) == spread)
        own = [gradient for gradient in parts if gradient is not None]
        if own:
            check_(own, None, squared_norm=square)
        total.add_(sum_over_ranks_(square, spread))
    return total
