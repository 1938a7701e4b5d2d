"""Find the 16-bit value behind the cast that widens a gradient: half the bytes to read, the same values."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fxamp.torch_dtypes import NARROW

aten = torch.ops.aten

#: Views that do not depend on the dtype: they do the same to a tensor of equal shape and strides in another dtype.
VIEWS = frozenset(
    {
        aten.alias.default,
        aten.permute.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)

CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)


def before_widening(node: Node, write: Callable[..., Node]) -> Node:
    """Return a 16-bit node with the same values if ``node`` is a widening cast or a view of one; else ``node``.

    ``write(op, *args)`` inserts a node; it is called to repeat the views between the cast and ``node``.
    """
    behind, views = behind_views(node)
    narrow = _widened(behind)
    if narrow is None:
        return node
    for view in reversed(views):
        assert callable(view.target)
        narrow = write(view.target, narrow, *view.args[1:])
    return narrow


def behind_views(node: Node) -> tuple[Node, list[Node]]:
    """Return what ``node`` is a view of, or ``node`` itself, and the views between the two, the last one first."""
    views: list[Node] = []
    while node.target in VIEWS:
        views.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return node, views


def erase_unused(node: Node) -> None:
    """Erase a cast, and views of it, that :func:`before_widening` left unused."""
    while not node._erased and not node.users and (node.target in VIEWS or node.target in CASTS):
        source: Any = node.args[0]
        node.graph.erase_node(node)
        node = source


def _widened(node: Node) -> Node | None:
    """Return the input of ``node`` if ``node`` casts 16 bits to float32 and does nothing else; else None."""
    source: Any = node.args[0] if node.target in CASTS else None
    if source is None:
        return None
    before, after = source.meta["val"], node.meta["val"]
    widened = before.dtype in NARROW and after.dtype == torch.float32
    same = before.device == after.device and before.stride() == after.stride()
    return source if widened and same else None
