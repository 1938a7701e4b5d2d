"""Linear layers of experts in 8-bit floats, as an op of captured graphs: ``torch.ops.fxamp.scaled_experts.default``.

Each group of rows is multiplied by the weight of its expert. Like :mod:`fxamp.kernels.products.scaled_linear`, the op
is differentiable and consists of ops that AOTAutograd traces. Its recipes match torchao's ``prototype.moe_training``.

1. The weight's gradient sums over the rows of each group. There the rows are padded with zeros to the recipe's
   multiple, and each group has its own scales. In the other products rows are independent, and nothing is padded.
2. Rows beyond the last offset are in no group: their results and gradients are zeros, as is the gradient of an expert
   without rows.
3. The kernels return bfloat16, so products are rounded to that first.
4. A second derivative raises: products of rounded values have none.
"""

from typing import Any

import torch
from torch import Tensor

from fxamp.kernels.products.group_layout import padded, starts_of
from fxamp.kernels.products.grouped_product import multiply_rows, multiply_sums, quantize_sums
from fxamp.kernels.products.quantize import Quantized, quantize
from fxamp.kernels.products.scaled_linear import quantize_weight, without_derivative
from fxamp.policy import RECIPES, Quantization, Recipe
from fxamp.torch_private import untraced

_LIBRARY = torch.library.Library("fxamp", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "scaled_experts(Tensor input, Tensor weight, Tensor? offsets, Tensor? bias, str recipe, ScalarType dtype) -> Tensor"
)


@torch.library.impl(_LIBRARY, "scaled_experts", "CompositeImplicitAutograd")
def scaled_experts(
    input: Tensor, weight: Tensor, offsets: Tensor | None, bias: Tensor | None, recipe: str, dtype: torch.dtype
) -> Tensor:
    """Return ``input[start:end] @ weight[expert]`` for the rows of each expert, multiplied in 8 bits.

    Args:
        input: floating ``[rows, K]``, or without ``offsets`` ``[experts, rows, K]``; at least one row.
        weight: floating ``[experts, K, N]``; K and N multiples of the recipe's.
        offsets: int32 ``[experts]``, in ascending order: where the rows of each expert end.
        bias: added to the rounded product in its dtype; its shape must expand to the result's.
        recipe: a :class:`fxamp.policy.Recipe` that is ``grouped``.
        dtype: float16 or bfloat16, the dtype of the result.

    Returns:
        ``[rows, N]`` or ``[experts, rows, N]`` in ``dtype``. The gradients of ``input`` and ``weight`` have the dtypes
        of these tensors.
    """
    rows, ends = input, offsets
    if ends is None:
        experts, each = input.shape[:2]
        rows = input.reshape(experts * each, input.shape[2])
        ends = each * torch.arange(1, experts + 1, dtype=torch.int32, device=input.device)
    product: Tensor = _Product.apply(rows, weight, ends.int(), Recipe(recipe), dtype)  # type: ignore[no-untyped-call]
    product = product if offsets is not None else product.view(*input.shape[:2], weight.shape[2])
    return product if bias is None else product + bias.to(dtype)


class _Product(torch.autograd.Function):
    """Three products: the output, the gradient of the input, the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
        of_rows, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if of_weight else None, weight if of_rows else None, offsets)
        ctx.dtypes, ctx.row_major, ctx.recipe = (rows.dtype, weight.dtype), weight.stride(-1) == 1, recipe
        left, right = RECIPES[recipe].output
        experts = _quantize_experts(weight.transpose(1, 2), right)
        return multiply_rows(quantize(rows, left), experts, offsets).to(dtype)

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, offsets = ctx.saved_tensors
        of_rows, of_weight = None, None
        with torch.no_grad():
            if ctx.needs_input_grad[0]:
                left, right = RECIPES[ctx.recipe].input_gradient
                experts = _quantize_experts(weight, right)
                of_rows = multiply_rows(quantize(gradient, left), experts, offsets).to(ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                of_weight = _weight_gradient(gradient, rows, ctx.row_major, offsets, ctx.recipe).to(ctx.dtypes[1])
        return without_derivative(of_rows), without_derivative(of_weight), None, None, None


def _weight_gradient(gradient: Tensor, rows: Tensor, row_major: bool, offsets: Tensor, recipe: Recipe) -> Tensor:
    """``[experts, K, N]`` in bfloat16, row-major or column-major as the weight is."""
    operands = RECIPES[recipe].weight_gradient
    if operands is None:
        factors = gradient.bfloat16(), rows.bfloat16()
        left, right = factors[::-1] if row_major else factors
        product = torch._grouped_mm(left.t(), right, offs=offsets)
        product = torch.where((offsets > starts_of(offsets)).view(-1, 1, 1), product, 0)
    else:
        places = padded(offsets, rows.shape[0], max(form.multiple for form in operands))
        pairs = zip((gradient, rows), operands, strict=True)
        of_gradient, of_rows = (quantize_sums(values, places, form) for values, form in pairs)
        product = multiply_sums(*((of_rows, of_gradient) if row_major else (of_gradient, of_rows)), places)
    return product if row_major else product.transpose(1, 2)


def _quantize_experts(weight: Tensor, form: Quantization) -> Quantized:
    """Quantize ``[experts, columns, sum]`` as ``[experts * columns, sum]``."""
    return quantize_weight(weight.reshape(-1, weight.shape[2]), form)
