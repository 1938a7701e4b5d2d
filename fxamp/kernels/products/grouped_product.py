"""The product of two quantized operands, group by group, as torch's ``scaled_grouped_mm`` computes it on a GPU.

1. Groups divide the rows: ``[rows, sum]`` by ``[groups, columns, sum]`` gives ``[rows, columns]``. Or they divide the
   dimension that is summed over: ``[rows, sum]`` by ``[columns, sum]`` gives ``[groups, rows, columns]``.
2. GPUs read blocks' scales group by group, in tiles of 128 rows and 4 blocks (``quantize.swizzled``).
3. torch leaves the results of rows beyond the last group, and of groups without rows, uninitialized. Here both are
   zeros.
4. Other devices multiply the operands in bfloat16, which holds their values exactly, as torchao's emulation does.
5. Inductor calls ``torch.ops.fxamp.scaled_grouped_mm`` as an opaque op. For torch's own op, its autotuning has a
   template that mistakes the scales of blocks for scales of rows.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from fxamp.kernels.products.group_layout import Padded, group_of, padded, starts_of, tile_order
from fxamp.kernels.products.quantize import (
    TILE,
    Quantized,
    Scale,
    dequantized,
    emulates,
    missing,
    quantize,
    rounded,
    scale_for,
    swizzled,
)
from fxamp.policy import ROW, Quantization
from fxamp.torch_private import computed_again

_LIBRARY = torch.library.Library("fxamp", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "scaled_grouped_mm(Tensor left, Tensor right, Tensor left_scale, Tensor right_scale, Tensor ends) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)


@torch.library.impl(_LIBRARY, "scaled_grouped_mm", "CUDA")
def scaled_grouped_mm(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, ends: Tensor) -> Tensor:
    """Return the product in bfloat16, by the module's first rule; the scales are laid out as the kernel reads them."""
    fast = left_scale.dtype is torch.float32
    transposed = right.transpose(-2, -1)
    return torch._scaled_grouped_mm(
        left, transposed, left_scale, right_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


@torch.library.register_fake("fxamp::scaled_grouped_mm", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, ends: Tensor) -> Tensor:
    groups = () if right.dim() == 3 else (ends.shape[0],)
    return left.new_empty((*groups, left.shape[0], right.shape[-2]), dtype=torch.bfloat16)


@register_flop_formula(torch.ops.fxamp.scaled_grouped_mm)
def _(left: torch.Size, right: torch.Size, *scales: object, **results: object) -> int:
    return 2 * left[0] * left[1] * right[-2]


grouped_kernel = torch.ops.fxamp.scaled_grouped_mm.default


def multiply_rows(left: Quantized, right: Quantized, offsets: Tensor) -> Tensor:
    """Return ``[rows, columns]`` in bfloat16, of ``[rows, sum]`` and ``[groups * columns, sum]``.

    ``offsets``: int32 ``[groups]``, where the groups of rows end.
    """
    groups, rows = offsets.shape[0], left.values.shape[0]
    if emulates(left.values.device):
        experts = _stacked(_dequantized(right), groups)
        product = torch._grouped_mm(_dequantized(left), experts.transpose(1, 2), offs=offsets)
    else:
        experts = _stacked(right.values, groups)
        scales = _row_scales(left, offsets), _expert_scales(right, groups)
        product = grouped_kernel(left.values, experts, *scales, offsets)
    with computed_again():  # in the kernels that read it, so that the product itself is kept
        inside = torch.arange(rows, device=offsets.device) < offsets.select(0, -1)
        return torch.where(inside.unsqueeze(1), product, 0)


def multiply_sums(left: Quantized, right: Quantized, places: Padded) -> Tensor:
    """Return ``[groups, rows, columns]`` in bfloat16, of ``[rows, sum]`` and ``[columns, sum]``.

    ``places``: the padded layout of the dimension that is summed over.
    """
    ends = places.ends
    if emulates(left.values.device):
        values = (_dequantized_sums(operand, ends) for operand in (left, right))
        product = torch._grouped_mm(next(values), next(values).t(), offs=ends)
    else:
        scales = (_sum_scales(operand, ends) for operand in (left, right))
        product = grouped_kernel(left.values, right.values, *scales, ends)
    return torch.where((ends > starts_of(ends)).view(-1, 1, 1), product, 0)


def quantize_sums(rows: Tensor, places: Padded, form: Quantization) -> Quantized:
    """Return ``rows``, ``[sum, columns]``, transposed and quantized group by group: ``[columns, padded sum]``.

    A recipe with scales for rows gives scales ``[columns, groups]``.
    """
    matrix = places.gather(rows).t()
    if form.block != ROW:
        return quantize(matrix, form)
    group, of_parts = (group_of(matrix.shape[1], places.ends, step) for step in (1, form.multiple))
    parts = matrix.reshape(matrix.shape[0], -1, form.multiple).abs().amax(-1)
    largest = parts.new_zeros(matrix.shape[0], places.ends.shape[0] + 1)
    scale = scale_for(largest.scatter_reduce(1, of_parts.expand_as(parts), parts, "amax"), form)
    of_groups = scale.values.narrow(1, 0, places.ends.shape[0])
    values = rounded(matrix, Scale(scale.values.index_select(1, group)), form)
    return Quantized(values, Scale(of_groups), form)


def _stacked(matrix: Tensor, groups: int) -> Tensor:
    """``[groups, columns, ...]`` of ``[groups * columns, ...]``."""
    return matrix.view(groups, matrix.shape[0] // groups, *matrix.shape[1:])


def _dequantized(operand: Quantized) -> Tensor:
    if operand.form.block != ROW:
        return dequantized(operand)
    return operand.values.bfloat16() * operand.scale.values.reciprocal().bfloat16()


def _dequantized_sums(operand: Quantized, ends: Tensor) -> Tensor:
    if operand.form.block != ROW:
        return dequantized(operand)
    group = group_of(operand.values.shape[1], ends).clamp(max=ends.shape[0] - 1)
    return _dequantized(replace(operand, scale=Scale(operand.scale.values.index_select(1, group))))


def _row_scales(operand: Quantized, offsets: Tensor) -> Tensor:
    """``[rows]`` in float32, or e8m0 ``[padded rows, padded blocks]``: each group has whole tiles."""
    if operand.form.block == ROW:
        return operand.scale.values.reciprocal().flatten()
    scale = padded(offsets, operand.scale.values.shape[0], TILE[0]).gather(operand.scale.values)
    return swizzled(scale, operand.form).view(scale.shape[0], -1)


def _expert_scales(operand: Quantized, groups: int) -> Tensor:
    """``[groups, columns]`` in float32, or e8m0 ``[groups, scales]``."""
    scale = _stacked(operand.scale.values, groups)
    if operand.form.block == ROW:
        return scale.reciprocal().squeeze(-1)
    scale = functional.pad(scale, (0, 0, 0, missing(scale.shape[1], TILE[0])))
    return swizzled(scale.flatten(0, 1), operand.form).view(groups, -1)


def _sum_scales(operand: Quantized, ends: Tensor) -> Tensor:
    """``[groups * rows]`` in float32, or e8m0 ``[padded rows, padded blocks]``: each group has whole tiles."""
    if operand.form.block == ROW:
        return operand.scale.values.reciprocal().t().flatten()
    places = padded(ends // operand.form.multiple, operand.scale.values.shape[1], TILE[1])
    scale = places.gather(operand.scale.values.t()).t()
    tiles = swizzled(scale, operand.form).view(torch.uint8).view(-1, TILE[0] * TILE[1])
    across = scale.shape[1] // TILE[1]
    down = tiles.shape[0] // across
    ordered = tiles.index_select(0, tile_order(places.ends // TILE[1], down, across))
    return ordered.view(down * TILE[0], scale.shape[1]).view(torch.float8_e8m0fnu)
