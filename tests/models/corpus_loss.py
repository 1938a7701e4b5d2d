"""A loss for models that have none."""

from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree


class Loss(NamedTuple):
    """What :func:`model_runs.step` reads of a model's result."""

    loss: torch.Tensor


class WithLoss(torch.nn.Module):
    """``model``, called with the batch, and a loss that depends on every element of each of its results in its own way.

    A weight that is zero all over, as last layers and gates of diffusion models are, is set at random: behind it, all
    gradients would be zero.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        for weight in model.parameters():
            if weight.dim() > 1 and not weight.any():
                torch.nn.init.normal_(weight, std=0.02)

    def forward(self, **batch: Any) -> Loss:
        results = [value for value in _tensors(self.model(**batch)) if value.requires_grad]
        return Loss(torch.stack([_loss(value) for value in results]).sum())


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _loss(value: torch.Tensor) -> torch.Tensor:
    exact = value.double() if value.dtype == torch.float64 else value.float()
    ramp = torch.linspace(-1, 1, value.numel(), dtype=exact.dtype, device=exact.device).view(value.shape)
    return (exact * ramp).mean() + exact.square().mean()
