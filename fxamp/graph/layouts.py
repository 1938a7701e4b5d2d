"""Compare and describe the memory layouts of values, without guards on symbolic sizes."""

from typing import TypeGuard

import torch
from torch import Tensor

from fxamp.graph.tensor_wrappers import is_wrapper
from fxamp.torch_private import hint


def has_strides(value: object) -> TypeGuard[Tensor]:
    """Whether ``value`` is one plain tensor with strides: no wrapper, no sparse tensor."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not is_wrapper(value)


def same_strides(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have the same memory layout; symbolic strides are compared as text."""
    if 0 in _known(a):
        return True
    pairs = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(_equal(mine, theirs) or _equal(size, 1) for size, mine, theirs in pairs)


def same_shape(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may have one shape: no size that is a number differs."""
    return a.dim() == b.dim() and all(m == t for m, t in zip(_known(a), _known(b), strict=True) if m >= 0 and t >= 0)


def dense_order(value: Tensor) -> tuple[int, ...] | None:
    """Return the order of dimensions in which ``value`` is contiguous; None if there is none, or it is unknown."""
    return _dense_order(value, ())


def expanded_order(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the expanded dimensions of ``value``, and the order in which it is contiguous if they have one element.

    None if there is no such order, or it is unknown.
    """
    expanded = tuple(
        dim for dim in range(value.dim()) if _equal(value.stride(dim), 0) and not _equal(value.size(dim), 1)
    )
    order = _dense_order(value, expanded)
    return None if order is None else (expanded, order)


def _dense_order(value: Tensor, expanded: tuple[int, ...]) -> tuple[int, ...] | None:
    sizes = [1 if dim in expanded else size for dim, size in enumerate(value.shape)]
    keys = [(hint(value.stride(dim)), hint(sizes[dim]), -dim) for dim in range(value.dim())]
    if any(None in key for key in keys):
        return None
    order = tuple(sorted(range(value.dim()), key=lambda dim: keys[dim], reverse=True))
    stride: int | torch.SymInt = 1
    for dim in reversed(order):
        if keys[dim][1] != 1 and not _equal(value.stride(dim), stride):
            return None
        stride = stride * sizes[dim]
    return order


def _known(value: Tensor) -> list[int]:
    """Return the sizes; -1 for one that is symbolic."""
    return [size if isinstance(size, int) else -1 for size in value.shape]


def _equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two numbers have the same text; comparing symbolic ones as numbers would add guards."""
    return a == b if isinstance(a, int) and isinstance(b, int) else str(a) == str(b)
