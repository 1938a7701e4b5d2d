"""realize-roundings: read a value that is rounded to 16 bits from its bits where the step computes its rounding error.

Inductor computes with a 16-bit value as it was before it was rounded, if the same kernel rounds it. Kahan's sum, which
keeps what the rounding of a parameter loses, would keep zeros: ``(old + update) - old - update`` is the error of the
sum alone. This pass inserts a view of the bits, for bfloat16 also their rounding, which changes nothing but which
Inductor cannot see through.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter, tensor_value
from fxamp.kernels.blockwise_8bit import UPPER_HALF
from fxamp.passes.shared.realize import Realize
from fxamp.passes.shared.widening import CASTS
from fxamp.torch_dtypes import NARROW

aten = torch.ops.aten

_COPIES = frozenset({aten.alias.default, aten.clone.default, aten.detach.default, *CASTS})

_SUMS: dict[Any, int] = {
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.lerp.Scalar, aten.lerp.Tensor), 2),
    **dict.fromkeys((aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar, aten.neg.default), 1),
    **dict.fromkeys((aten.addcmul.default, aten.addcdiv.default), 1),
}
"""Ops that return a sum, and how many of their first arguments are its terms."""


@dataclass(frozen=True)
class RealizeRoundings(Realize):
    """Ensures that a difference of a value and of a 16-bit sum or copy of that value reads the latter from its bits."""

    name = "realize-roundings"

    def selected(self, gm: GraphModule) -> list[Node]:
        """Return the values that are rounded between a value and its difference from them, in the graph's order."""
        if not any(map(_rounds, gm.graph.nodes)):
            return []
        selected: set[Node] = set()
        for minuend, subtrahend in _differences(gm):
            for start, end in ((minuend, subtrahend), (subtrahend, minuend)):
                selected |= _roundings_between(_original(start), end) or set()
        return [node for node in gm.graph.nodes if node in selected]

    def reads_realized(self, reader: Node) -> bool:
        return reader.target is not aten.copy_.default

    def realized(self, writer: GraphWriter, node: Node) -> Node:
        if node.meta["val"].dtype is torch.bfloat16:
            return _rounded(writer, node)
        bits = writer.call(aten.view.dtype, node, torch.int16)
        same = writer.call(aten.bitwise_and.Scalar, bits, -1)  # two views alone would be removed
        return writer.call(aten.view.dtype, same, node.meta["val"].dtype)


def _rounded(writer: GraphWriter, node: Node) -> Node:
    """Round ``node`` to nearest even as a float32: no change, unless Inductor has left the rounding out.

    Inductor's vectors for CPUs have no integers of 16 bits, so the bits of the bfloat16 itself would cost ten times as
    much.
    """
    wide = writer.in_dtype(node, torch.float32)
    bits = writer.call(aten.view.dtype, wide, torch.int32)
    last = writer.call(aten.bitwise_and.Scalar, writer.call(aten.bitwise_right_shift.Tensor_Scalar, bits, 16), 1)
    above = writer.call(aten.add.Tensor, writer.call(aten.add.Tensor, bits, last), 0x7FFF)
    rounded = writer.call(aten.view.dtype, writer.call(aten.bitwise_and.Scalar, above, UPPER_HALF), torch.float32)
    nan = writer.call(aten.full.default, [], math.nan, dtype=torch.float32, device=node.meta["val"].device)
    same = writer.call(aten.where.self, writer.call(aten.isnan.default, wide), nan, rounded)
    return writer.in_dtype(same, torch.bfloat16)


def _differences(gm: GraphModule) -> Iterator[tuple[Node, Node]]:
    """Yield what is subtracted from what, also as a sum with a negated term."""
    for node in gm.graph.nodes:
        if node.target not in (aten.sub.Tensor, aten.add.Tensor):
            continue
        terms = [term for term in node.args[:2] if isinstance(term, Node)]
        alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
        negated = any(_original(term).target is aten.neg.default for term in terms)
        if len(terms) == 2 and (node.target is aten.sub.Tensor or alpha != 1 or negated):
            yield terms[0], terms[1]


def _original(node: Node) -> Node:
    """Return what the node copies, through copies of copies; itself if it copies nothing."""
    while node.target in _COPIES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _roundings_between(start: Node, end: Node) -> set[Node] | None:
    """Return the values that are rounded where ``end`` is computed from ``start`` by sums; None if it is not."""
    found: dict[Node, set[Node] | None] = {start: set()}
    stack = [end]
    while stack:
        node = stack[-1]
        missing = [term for term in _terms(node) if term not in found] if node not in found else []
        if missing:
            stack += missing
            continue
        stack.pop()
        if node not in found:
            reached = [between for term in _terms(node) if (between := found[term]) is not None]
            own = {node} if _rounds(node) else set()
            found[node] = own.union(*reached) if reached else None
    return found[end]


def _terms(node: Node) -> list[Node]:
    """Return the values whose sum, copy or selection the node is."""
    args = node.args[1:3] if node.target is aten.where.self else node.args[: _SUMS.get(node.target, 0)]
    args = node.args[:1] if node.target in _COPIES else args
    return [arg for arg in args if isinstance(arg, Node)]


def _rounds(node: Node) -> bool:
    """Whether the node rounds a sum, or a wider value, to 16 bits."""
    value = tensor_value(node)
    if node.op != "call_function" or value is None or value.dtype not in NARROW:
        return False
    if node.target not in _COPIES:
        return node.target in _SUMS and node.target is not aten.neg.default
    source = tensor_value(node.args[0])
    return source is not None and source.dtype is not value.dtype and source.is_floating_point()
