"""Tensors of any kind as plain ones of real numbers."""

import torch
from torch import Tensor


def flat(tensor: Tensor) -> Tensor:
    """``tensor`` dense, and complex numbers as pairs; itself if it is dense and real."""
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
