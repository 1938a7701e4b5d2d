"""Products of experts as torchao's ``prototype.moe_training`` computes them, in emulation or in its pieces."""

import pytest
import torch
from torch import Tensor

from support.oracles.mxfp8_beside import mode

grouped_mm = pytest.importorskip(
    "torchao.prototype.moe_training.mxfp8_grouped_mm", reason="this torchao has no groups", exc_type=ImportError
)
utils = pytest.importorskip(
    "torchao.prototype.moe_training.utils", reason="this torchao has no groups", exc_type=ImportError
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference  # noqa: E402 (after the check)


def product(rows: Tensor, weight: Tensor, offsets: Tensor, recipe: str) -> Tensor:
    """torchao's differentiable product in MXFP8: ``[rows, K]`` by ``[experts, K, N]``, in bfloat16."""
    result: Tensor = grouped_mm._to_mxfp8_then_scaled_grouped_mm(
        rows,
        weight,
        offsets,
        kernel_preference=KernelPreference.EMULATED,
        wgrad_with_hp=recipe.endswith("_wgrad_with_hp"),
        scale_calculation_mode=mode(recipe),
        pad_token_groups_for_grouped_mm=True,
    )
    return result


def rowwise(
    rows: Tensor, weight: Tensor, gradient: Tensor, ends: list[int], dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients in float64, of the values and scales that torchao's fp8 products of experts multiply.

    Its products run on GPUs alone.
    """
    output, of_rows = torch.zeros_like(gradient).double(), torch.zeros_like(rows).double()
    of_weight = torch.zeros_like(weight).double()
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start == end:
            continue
        x, w, g = rows[start:end], weight[expert], gradient[start:end]
        output[start:end] = scaled(x, dtype) @ scaled(w.t(), dtype).t()
        of_rows[start:end] = scaled(g, dtype) @ scaled(w, dtype).t()
        of_weight[expert] = scaled(x.t(), dtype) @ scaled(g.t(), dtype).t()
    return output, of_rows, of_weight


def scaled(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of ``matrix`` in 8 bits with a scale for each row, as torchao rounds them, in float64."""
    strides = (matrix.numel(), 1, matrix.shape[0])  # torchao takes column-major operands
    operand = matrix.new_empty_strided((1, *matrix.shape), strides).copy_(matrix)
    values, scale = utils.torch_to_3d_rowwise_float8_transpose_rhs(operand, dtype, round_scales_to_power_of_2=True)
    dequantized: Tensor = (values.double() / scale.double())[0].t()
    return dequantized
