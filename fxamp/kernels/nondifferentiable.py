"""A value that cannot be differentiated: its backward raises an error of the caller's choice."""

from typing import Any

import torch
from torch import Tensor

from fxamp.torch_private import untraced


def nondifferentiable(value: Tensor, error: Exception) -> Tensor:
    """Return a view of ``value``; if it needs a gradient, differentiating it raises ``error``."""
    same: Tensor = _Refuse.apply(value, error)  # type: ignore[no-untyped-call]
    return same


class _Refuse(torch.autograd.Function):
    """The identity; differentiating it raises."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return value.view_as(value)

    @staticmethod
    @untraced
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        raise ctx.error
