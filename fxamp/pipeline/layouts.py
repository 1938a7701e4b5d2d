"""Restore the memory layouts with which AOTAutograd traced the values of a graph.

Ops of such a graph rely on the strides of their inputs: with other strides a view fails, ``as_strided`` reads other
elements, and some kernels read past the memory of an expanded value. A pass that removes or replaces a node changes
strides: if it removes a sum that made a value dense, the readers get the expanded term.

1. If an op or the output reads a value whose strides differ from the traced ones, the value is copied into the traced
   layout. Expanded dimensions are expanded again.
2. Strides that no such copy has (overlapping windows, gaps) become contiguous; ``as_strided`` cannot read these.
3. An op that reads another dtype, which a pass decides, or contiguous strides by rule 2, is computed again on
   FakeTensors. If its result has different strides than traced, rules 1 and 3 apply to its readers.
"""

import operator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fxamp.graph import (
    GraphWriter,
    computed,
    dense_order,
    expanded_order,
    has_strides,
    is_mutable,
    same_shape,
    same_strides,
)
from fxamp.passes.base import Context, TracedPass

aten = torch.ops.aten

_WHY = "for {}: the strides that it was traced with"


class TracedLayouts:
    """The values that the ops of ``gm`` read before a pass."""

    def __init__(self, gm: GraphModule) -> None:
        self._values = {node: node.meta.get("val") for node in gm.graph.nodes}
        self._arguments = {node: (node.args, node.kwargs) for node in gm.graph.nodes}

    def restore(self, gm: GraphModule, step: TracedPass[Any], context: Context) -> int:
        """Apply the rules to ``gm``, which ``step`` has rewritten; return the number of copies.

        Raises RuntimeError if an op reads a different shape than it was traced with, or strides that it cannot read.
        """
        copies = _Copies(gm.graph, GraphWriter(gm.graph, context.mode))
        changed = {node for node, value in self._values.items() if node.meta.get("val") is not value}
        with context.computing():
            for node in list(gm.graph.nodes):
                if (self._unchanged(node) and changed.isdisjoint(node.all_input_nodes)) or not step.relies(node):
                    continue
                traced = node in self._arguments and self._restore_reads(node, step.outputs, copies)
                if not traced and _computed_again(node):
                    changed.add(node)
        return copies.count

    def _unchanged(self, node: Node) -> bool:
        """Whether the pass left the call alone; of a new one only changed inputs matter."""
        args, kwargs = self._arguments.get(node, (node.args, node.kwargs))
        return node.args is args and node.kwargs is kwargs

    def _restore_reads(self, node: Node, outputs: int | None, copies: "_Copies") -> bool:
        """Apply rules 1 and 2 to what ``node`` reads; return whether all has the traced dtypes and strides."""
        now, spec = pytree.tree_flatten((node.args, node.kwargs))
        was = pytree.tree_leaves(self._arguments[node])
        if node.op == "output":
            was = was[:outputs]
        elif len(was) != len(now) or is_mutable(node):
            return False
        pairs = [self._restored(*pair, node, copies) for pair in zip(was, now, strict=False)]
        restored = [*(source for source, _ in pairs), *now[len(pairs) :]]
        if any(map(operator.is_not, restored, now)):
            node.args, node.kwargs = pytree.tree_unflatten(restored, spec)
        return all(traced for _, traced in pairs)

    def _restored(self, was: Any, now: Any, node: Node, copies: "_Copies") -> tuple[Any, bool]:
        """Return what ``node`` must read for ``now``, which replaced ``was``; and whether it is as traced."""
        if not (isinstance(was, Node) and isinstance(now, Node)):
            return now, was is now
        before, value = self._values[was], now.meta.get("val")
        if before is value or not (has_strides(before) and has_strides(value)):
            return now, before is value
        if not same_shape(before, value):
            raise RuntimeError(f"{node.name} reads {now.name} of shape {_shape(value)}, traced with {_shape(before)}")
        if same_strides(before, value):
            return now, before.dtype == value.dtype
        layout = expanded_order(before)
        if layout is None and node.target in _READ_MEMORY:
            raise RuntimeError(f"{node.name} reads the memory of {now.name}, which had strides {_strides(before)}")
        if layout is None and dense_order(value) == tuple(range(value.dim())):
            return now, False
        copy = copies.write(now, layout or ((), tuple(range(before.dim()))), node)
        return copy, layout is not None and before.dtype == value.dtype


#: The expanded dimensions of a value, and the order in which the others are contiguous.
Layout = tuple[tuple[int, ...], tuple[int, ...]]


class _Copies:
    """Writes copies into one graph, one for each value and layout."""

    def __init__(self, graph: Graph, writer: GraphWriter) -> None:
        self._graph = graph
        self._call = writer.call
        self._written: dict[tuple[Node, Layout], Node] = {}

    @property
    def count(self) -> int:
        """Return the number of copies."""
        return len(self._written)

    def write(self, node: Node, layout: Layout, reader: Node) -> Node:
        """Return ``node`` in ``layout``, before its first reader."""
        if (node, layout) not in self._written:
            with self._graph.inserting_before(reader):
                self._written[node, layout] = self._copy(node, *layout, _WHY.format(reader.name))
        return self._written[node, layout]

    def _copy(self, node: Node, expanded: tuple[int, ...], order: tuple[int, ...], why: str) -> Node:
        def call(op: OpOverload, source: Node, *args: Any, **kwargs: Any) -> Node:
            return self._call(op, source, *args, near=node, why=why, **kwargs)

        part, moved = node, list(order) != sorted(order)
        for dim in expanded:
            part = call(aten.slice.Tensor, part, dim, 0, 1)
        part = call(aten.permute.default, part, list(order)) if moved else part
        part = call(aten.clone.default, part, memory_format=torch.contiguous_format)
        part = call(aten.permute.default, part, [order.index(dim) for dim in sorted(order)]) if moved else part
        if not expanded:
            return part
        sizes = [self._size(node, dim) if dim in expanded else -1 for dim in range(len(order))]
        return call(aten.expand.default, part, sizes)

    def _size(self, node: Node, dim: int) -> int | Node:
        size = node.meta["val"].shape[dim]
        return size if isinstance(size, int) else self._call(aten.sym_size.int, node, dim, near=node)


#: Ops that read memory of a tensor outside of its elements.
_READ_MEMORY = (aten.as_strided.default, aten.as_strided_copy.default)


def _computed_again(node: Node) -> bool:
    """Apply rule 3; return whether the value of ``node`` changed."""
    if node.target is not operator.getitem and not isinstance(node.target, OpOverload):
        return False
    if isinstance(node.target, OpOverload) and (is_mutable(node) or _NEW_NUMBERS.intersection(node.target.tags)):
        return False
    value = computed(node)
    if _alike(value, node.meta.get("val")):
        return False
    node.meta["val"] = value
    return True


#: Ops with these tags create new symbolic numbers each time.
_NEW_NUMBERS = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})


def _alike(a: object, b: object) -> bool:
    ours, theirs = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(ours) == len(theirs) and all(map(_same_layout, ours, theirs))


def _same_layout(a: object, b: object) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return not isinstance(a, Tensor) and not isinstance(b, Tensor)
    if not (has_strides(a) and has_strides(b)):
        return a.layout == b.layout
    return a.dtype == b.dtype and same_shape(a, b) and same_strides(a, b)


def _shape(value: Tensor) -> list[str]:
    return list(map(str, value.shape))


def _strides(value: Tensor) -> list[str]:
    return list(map(str, value.stride()))
