"""A linear layer in 8-bit floats, as an op of captured graphs: ``torch.ops.fxamp.scaled_linear.default``.

It is differentiable, and made of ATen ops that AOTAutograd traces. So a compiler can fuse scales and casts with the ops
that compute the values, and decides what is kept for the backward. Its recipes match torchao.float8 bit for bit.

1. A scale maps the largest absolute value of a tensor, or of a row or column, to the largest value of the 8-bit dtype.
2. If that absolute value is infinite or NaN, the results are NaN, so a loss scaler detects it.
3. Every operand of ``torch._scaled_mm`` has the layout that GPUs need: the first row-major, the second column-major.
   Dimensions that are summed over rows are padded with zeros to a multiple of 16.
4. The backward casts weights again, so that no 8-bit copies of them are kept (pytorch #141881).
5. A second derivative raises: ``_scaled_mm`` has none. (Breaks loudly if torch changes that op.)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fxamp.policy import Recipe
from fxamp.torch_private import computed_again, untraced

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

MULTIPLE = 16
"""The number that every size of an operand, except the number of rows, must be a multiple of."""

#: The smallest absolute value that a scale is computed from; torchao uses the same.
_SMALLEST = 1e-12

_LIBRARY = torch.library.Library("fxamp", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "scaled_linear(Tensor input, Tensor weight, Tensor? bias, str recipe, ScalarType dtype) -> Tensor"
)


@torch.library.impl(_LIBRARY, "scaled_linear", "CompositeImplicitAutograd")
def scaled_linear(input: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, dtype: torch.dtype) -> Tensor:
    """Return ``input @ weight.T + bias``, multiplied in 8 bits.

    Args:
        input: floating ``[..., K]`` with at least one row; K a multiple of 16.
        weight: floating ``[N, K]``; N a multiple of 16.
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
        ctx.save_for_backward(input, weight)
        ctx.recipe, ctx.dtype = recipe, dtype
        product = output_product(_rows(input), weight, recipe, dtype)
        return product.reshape(*input.shape[:-1], weight.shape[0])

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        input, weight = ctx.saved_tensors
        of_input, of_weight = None, None
        if ctx.needs_input_grad[0]:
            of_input = input_gradient(_rows(gradient), weight, ctx.recipe, ctx.dtype)
            of_input = of_input.reshape(input.shape).to(input.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = weight_gradient(_rows(gradient), _rows(input), ctx.recipe, ctx.dtype).to(weight.dtype)
        return of_input, of_weight, None, None


def output_product(rows: Tensor, weight: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """``[rows, K] @ [K, N]`` in ``dtype``, of the rows and the transposed ``weight`` ``[N, K]``."""
    if recipe is Recipe.TENSORWISE:
        return _multiply(_cast(rows, E4M3), _cast_weight(weight.t()), dtype, fast=True)
    return _multiply_rowwise(_cast(rows, E4M3, -1), _cast_weight(weight.t(), 0), dtype, fast=True)


def input_gradient(gradient: Tensor, weight: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """``[rows, N] @ [N, K]`` in ``dtype``."""
    if recipe is Recipe.TENSORWISE:
        return _multiply(_cast(gradient, E5M2), _cast_weight(weight), dtype)
    if recipe is Recipe.ROWWISE:
        return _multiply_rowwise(_cast(gradient, E4M3, -1), _cast_weight(weight, 0), dtype)
    whole = _cast_weight(weight, powers=True)
    one_each = _Scaled(whole.values, whole.scale.expand(1, weight.shape[1]))
    return _multiply_rowwise(_cast(gradient, E4M3, -1), one_each, dtype)


def weight_gradient(gradient: Tensor, rows: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """``[N, rows] @ [rows, K]`` in ``dtype``: a sum over rows."""
    if recipe is Recipe.ROWWISE_WITH_GW_HP:
        return gradient.to(dtype).t() @ rows.to(dtype)
    if recipe is Recipe.TENSORWISE:
        return _multiply(_cast(gradient.t(), E5M2, pad=-1), _second(_cast(rows, E4M3, pad=0)), dtype)
    return _multiply_rowwise(_cast(gradient.t(), E4M3, -1, pad=-1), _second(_cast(rows, E4M3, 0, pad=0)), dtype)


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


@dataclass(frozen=True)
class _Scaled:
    """A matrix in 8 bits, and the scale or scales that its values were multiplied by."""

    values: Tensor
    scale: Tensor


def _cast(values: Tensor, dtype: torch.dtype, dim: int | None = None, *, pad: int | None = None) -> _Scaled:
    """Return a matrix in ``dtype`` with one scale, or one per vector along ``dim``; see :func:`_round` for ``pad``."""
    scale = scale_for(values, dtype, dim, powers=dim is not None)
    return _Scaled(_round(values, scale, dtype, pad), scale)


def _cast_weight(weight: Tensor, dim: int | None = None, *, powers: bool = False) -> _Scaled:
    """Return a weight as the second operand of a product. No 8-bit copy is kept: the backward has the weight."""
    scale = scale_for(weight, E4M3, dim, powers=powers or dim is not None)
    with computed_again():
        return _second(_Scaled(_round(weight, scale, E4M3), scale))


def scale_for(values: Tensor, dtype: torch.dtype, dim: int | None, powers: bool) -> Tensor:
    """Return what ``values`` are multiplied by before they are rounded to ``dtype``, 8 bits.

    The largest magnitude becomes the largest of ``dtype``: that of the whole tensor, or of each vector along ``dim``,
    which the result keeps with size 1. ``powers``: scales are rounded down to powers of two.
    """
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    # Compilers and eager mode divide float32 differently; a float64 quotient rounds to the same float32 in both.
    largest = largest.double()
    scale = (torch.finfo(dtype).max / torch.where(largest < _SMALLEST, _SMALLEST, largest)).float()
    return torch.exp2(torch.floor(torch.log2(scale))) if powers else scale


def _round(values: Tensor, scale: Tensor, dtype: torch.dtype, pad: int | None = None) -> Tensor:
    """Return ``values`` times ``scale`` in ``dtype``; ``pad``: pad this dimension with zeros to a multiple of 16.

    Nothing is clamped: what exceeds the largest of ``dtype`` by rounding alone is rounded back to it. A clamp would
    cost time, and beside one as Inductor writes it Triton miscompiles transposed stores of 8 bits (triton #11111).
    """
    scaled = values.float() * scale
    return (scaled if pad is None else _padded(scaled, pad)).to(dtype)


def _padded(values: Tensor, dim: int) -> Tensor:
    missing = -values.shape[dim] % MULTIPLE
    if isinstance(missing, int) and missing == 0:
        return values
    return functional.pad(values, (0, missing) if dim == -1 else (0, 0, 0, missing))


def _second(matrix: _Scaled) -> _Scaled:
    """Return the tensor in the layout of a second operand: column-major."""
    return _Scaled(matrix.values.t().contiguous().t(), matrix.scale)


def _multiply(left: _Scaled, right: _Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return the product of two scaled matrices, the second column-major; ``fast``: accumulate with fewer bits."""
    return torch._scaled_mm(
        left.values.contiguous(),
        right.values,
        scale_a=left.scale.reciprocal(),
        scale_b=right.scale.reciprocal(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def _multiply_rowwise(left: _Scaled, right: _Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """As :func:`_multiply`, with scales ``[rows, 1]`` and ``[1, columns]``; the kernels for these return bfloat16.

    Without ``fast`` the scales are applied to the product: there is no kernel for both.
    """
    if fast:
        return _multiply(left, right, torch.bfloat16, fast).to(dtype)
    one = left.scale.new_ones(())
    product = _multiply(_Scaled(left.values, one), _Scaled(right.values, one), torch.bfloat16)
    return (product * (left.scale.reciprocal() * right.scale.reciprocal())).to(torch.bfloat16).to(dtype)
