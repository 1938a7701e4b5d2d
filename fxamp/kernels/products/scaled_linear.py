"""A linear layer in floats of 8 or 4 bits, as an op of captured graphs: ``torch.ops.fxamp.scaled_linear.default``.

It is differentiable, and made of ATen ops that AOTAutograd traces. So a compiler can fuse scales and casts with the ops
that compute the values, and choose what to save for the backward. Its recipes match torchao bit for bit.

1. The operands are quantized as the recipe says (``quantize``). The weight's gradient, which sums over rows, pads them
   with zeros.
2. The backward quantizes weights again, so that no 8-bit copies of them are saved (pytorch #141881).
3. Each operand is saved only if the other one needs a gradient, as eager mode's linear does: a program may write to the
   input of a frozen layer.
4. A second derivative raises: products of rounded values have none.
5. Gradients in 4 bits are rounded stochastically, reproducibly under ``torch.manual_seed``; see ``float4``.
"""

from typing import Any

import torch
from torch import Tensor

from fxamp.kernels.nondifferentiable import nondifferentiable
from fxamp.kernels.products.quantize import (
    Quantized,
    multiply,
    prepared,
    quantize,
    quantize_transposed,
    rounded,
    scale_of,
)
from fxamp.policy import RECIPES, Quantization, Recipe
from fxamp.torch_private import computed_again, untraced

_NO_SECOND = (
    "a product of rounded values has no second derivative, but one was asked for; accepted: a backward without "
    "create_graph, or a policy that leaves this product in 16 bits"
)

_LIBRARY = torch.library.Library("fxamp", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "scaled_linear(Tensor input, Tensor weight, Tensor? bias, str recipe, ScalarType dtype) -> Tensor"
)


@torch.library.impl(_LIBRARY, "scaled_linear", "CompositeImplicitAutograd")
def scaled_linear(input: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, dtype: torch.dtype) -> Tensor:
    """Return ``input @ weight.T + bias``, multiplied in 8 or 4 bits.

    Args:
        input: floating ``[..., K]`` with at least one row; K a multiple of the recipe's.
        weight: floating ``[N, K]``; N a multiple of the recipe's.
        bias: added to the rounded product in its dtype; its shape must expand to the result's.
        recipe: one of :class:`fxamp.policy.Recipe`.
        dtype: float16 or bfloat16, the dtype of the products.

    Returns:
        ``[..., N]`` in ``dtype``. The gradients of ``input`` and ``weight`` have the dtypes of these tensors.
    """
    product: Tensor = _Product.apply(input, weight, Recipe(recipe), dtype)  # type: ignore[no-untyped-call]
    return product if bias is None else product + bias.to(dtype)


class _Product(torch.autograd.Function):
    """Three products: the output, the gradient of the input, the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
        of_input, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(input if of_weight else None, weight if of_input else None)
        ctx.dtypes, ctx.recipe, ctx.dtype = (input.dtype, weight.dtype), recipe, dtype
        product = output_product(_rows(input), weight, recipe, dtype)
        return product.reshape(*input.shape[:-1], weight.shape[0])

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        input, weight = ctx.saved_tensors
        of_input, of_weight = None, None
        with torch.no_grad():
            if ctx.needs_input_grad[0]:
                of_input = input_gradient(_rows(gradient), weight, ctx.recipe, ctx.dtype)
                of_input = of_input.reshape(*gradient.shape[:-1], weight.shape[1]).to(ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                of_weight = weight_gradient(_rows(gradient), _rows(input), ctx.recipe, ctx.dtype).to(ctx.dtypes[1])
        return without_derivative(of_input), without_derivative(of_weight), None, None


def without_derivative(gradient: Tensor | None) -> Tensor | None:
    """Return ``gradient``, a product of rounded values: differentiating it again raises RuntimeError."""
    if gradient is None or not torch.is_grad_enabled():
        return gradient
    return nondifferentiable(gradient.requires_grad_(), RuntimeError(_NO_SECOND))


def output_product(rows: Tensor, weight: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """``[rows, K] @ [K, N]`` in ``dtype``, of the rows and the transposed ``weight`` ``[N, K]``."""
    left, right = RECIPES[recipe].output
    return multiply(quantize(rows, left), quantize_weight(weight, right), dtype, fast=True)


def input_gradient(gradient: Tensor, weight: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """``[rows, N] @ [N, K]`` in ``dtype``."""
    left, right = RECIPES[recipe].input_gradient
    return multiply(quantize(gradient, left), quantize_weight(weight.t(), right), dtype)


def weight_gradient(gradient: Tensor, rows: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """``[N, rows] @ [rows, K]`` in ``dtype``: a sum over rows."""
    operands = RECIPES[recipe].weight_gradient
    if operands is None:
        return gradient.to(dtype).t() @ rows.to(dtype)
    left, right = operands
    return multiply(quantize(gradient.t(), left), quantize_transposed(rows, right), dtype)


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


def quantize_weight(weight: Tensor, form: Quantization) -> Quantized:
    """As :func:`quantize`; the quantized copy is not saved for the backward, which has the weight."""
    weight = prepared(weight, form)
    scale = scale_of(weight, form)
    with computed_again():
        return Quantized(rounded(weight, scale, form), scale, form)
