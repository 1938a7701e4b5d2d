"""NVFP4 by torchao's pieces: its quantization, its Hadamard matrix, and products of what it dequantizes, in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

nvfp4_tensor = pytest.importorskip(
    "torchao.prototype.mx_formats.nvfp4_tensor", reason="this torchao has no NVFP4", exc_type=ImportError
)
hadamard_utils = pytest.importorskip(
    "torchao.prototype.moe_training.nvfp4_training.hadamard_utils",
    reason="this torchao does not train in NVFP4",
    exc_type=ImportError,
)

RECIPES = ("pretraining", "pretraining_without_rht", "pretraining_without_sr", "nearest")
SIGNS = (-1, -1, -1, -1, -1, -1, 1, 1, 1, 1, -1, 1, 1, -1, 1, 1)


def hadamard(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """torchao's matrix with fxamp's signs, ``[16, 16]``."""
    matrix: Tensor = hadamard_utils.get_rht_matrix(SIGNS, "cpu", dtype, 16)
    return matrix


def spread(matrix: Tensor) -> Tensor:
    """What torchao's kernel quantizes of a transformed matrix: float32 sums, rounded to bfloat16."""
    blocks = matrix.bfloat16().reshape(-1, 16).float()
    return (blocks @ hadamard().float()).bfloat16().reshape(matrix.shape)


def quantized(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed values, bytes of scales, and the tensor's scale, of a matrix in blocks along its rows."""
    outer = nvfp4_tensor.per_tensor_amax_to_scale(matrix.float().abs().max())
    scale, values = nvfp4_tensor.nvfp4_quantize(matrix.contiguous(), 16, outer)
    return values, scale.view(torch.uint8), outer


def dequantized(matrix: Tensor) -> Tensor:
    """The values of a quantized matrix, float32; the sum is padded to a multiple of 32."""
    whole = F.pad(matrix, (0, -matrix.shape[1] % 32)).contiguous()
    outer = nvfp4_tensor.per_tensor_amax_to_scale(whole.float().abs().max())
    tensor = nvfp4_tensor.NVFP4Tensor.to_nvfp4(whole, 16, outer)
    values: Tensor = tensor.dequantize(torch.float32)
    return values[:, : matrix.shape[1]]


def of_tiles(weight: Tensor) -> Tensor:
    """The values of a weight in tiles of 16 x 16, float32: torchao quantizes the tile's 256 values as its blocks.

    The tile's largest magnitude is put beside each of its rows, in a block of its own scale's length.
    """
    rows, columns = weight.shape
    tiles = weight.reshape(rows // 16, 16, columns // 16, 16).transpose(1, 2)
    largest = tiles.abs().amax((2, 3), keepdim=True).expand(-1, -1, 16, 1)
    left, right = (torch.cat((half, largest.expand(-1, -1, 16, 8)), -1) for half in tiles.split(8, -1))
    blocks = torch.stack((left, right), -2)  # 8 values and 8 times the largest: its scale is the tile's
    values = dequantized(blocks.reshape(-1, 32)).reshape(blocks.shape)[..., :8]
    return values.flatten(-2).transpose(1, 2).reshape(rows, columns)
