"""The ops that sum a weight's gradient over the chunks of a loss, and that keep the chunks in order.

Graphs are traced with ``add_product``, which the pass add-in-place replaces by ``add_product_``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fxamp.torch_devices import native_bfloat16
from fxamp.torch_private import has_wide_products, write_wide_product


@torch.library.custom_op("fxamp::wide_product", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left.T @ right``, ``[N, K]``, accumulated in float32.

    Args:
        left: ``[M, N]``, float16, bfloat16 or float32.
        right: ``[M, K]`` in the dtype of ``left``.
    """
    product = left.new_empty(left.shape[1], right.shape[1], dtype=torch.float32)
    _multiply(left, right, product, add=False)
    return product


@torch.library.custom_op("fxamp::add_product", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def add_product(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """Return the sum of ``total``, float32 ``[N, K]``, and :func:`wide_product`.

    Inductor has no lowering for ``addmm`` with a wider result, and would keep all products to sum them in one kernel.
    """
    total = total.clone()
    add_product_(left, right, total)
    return total


@torch.library.custom_op("fxamp::add_product_", mutates_args=("total",), tags=(torch.Tag.flexible_layout,))
def add_product_(left: Tensor, right: Tensor, total: Tensor) -> None:
    """Add :func:`wide_product` to ``total``, float32 ``[N, K]``."""
    _multiply(left, right, total, add=True)


def _multiply(left: Tensor, right: Tensor, total: Tensor, add: bool) -> None:
    """Write :func:`wide_product` to ``total``, float32 ``[N, K]``; ``add``: add it to what ``total`` holds."""
    if left.is_cuda and left.dtype is not torch.float32:
        if add:
            torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
        else:
            torch.mm(left.t(), right, out_dtype=torch.float32, out=total)
    elif _has_wide_product(left) and total.is_contiguous():
        write_wide_product(left, right, total, add)
    else:
        total.addmm_(left.t().float(), right.float(), beta=int(add))


def _has_wide_product(factor: Tensor) -> bool:
    """Whether a CPU multiplies ``factor`` without converting it to float32 first, which is five times as fast."""
    return factor.is_cpu and factor.dtype is torch.bfloat16 and native_bfloat16("cpu") and has_wide_products()


@wide_product.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[1], right.shape[1], dtype=torch.float32)


@add_product.register_fake
def _(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    return torch.empty_like(total)


@register_flop_formula([torch.ops.fxamp.wide_product, torch.ops.fxamp.add_product, torch.ops.fxamp.add_product_])
def _flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    return 2 * int(left[0]) * int(left[1]) * int(right[1])


@torch.library.custom_op("fxamp::copy_after", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def copy_after(values: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """Return a copy of ``values`` that depends on ``earlier``: a compiler cannot compute what reads it before them."""
    return values.clone(memory_format=torch.contiguous_format)


@copy_after.register_fake
def _(values: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)
