"""drop-unused-results: remove the gradients of unused results from a backward graph.

Otherwise autograd would write zeros for them, and the graph would read them. A backward is linear in its tangents, so:

1. The named tangents are removed from the inputs; each is known to be zeros.
2. An op in :data:`LINEAR` returns zeros if an argument in which it is linear is zeros. If the sizes of its result are
   symbolic, the op stays, and reads zeros.
3. Adding zeros to a tensor does not change it. It makes a sparse tensor dense, so that sum stays.
4. If another op reads the zeros, or they are an output, a node creates them; Inductor fuses it into the op that reads
   it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter
from fxamp.passes.base import Context, Result, TracedPass
from fxamp.passes.shared.widening import CASTS, VIEWS

aten = torch.ops.aten

#: Ops that return zeros for zeros, and the positions of arguments; one of these must be zeros.
LINEAR: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys((*VIEWS, *CASTS), (0,)),
    **dict.fromkeys((aten.reshape.default, aten._unsafe_view.default, aten.expand.default, aten.clone.default), (0,)),
    **dict.fromkeys((aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.slice.Tensor), (0,)),
    **dict.fromkeys((aten.select.int, aten.slice_backward.default, aten.select_backward.default), (0,)),
    aten.div.Tensor: (0,),
    **dict.fromkeys((aten.mul.Tensor, aten.mm.default, aten.bmm.default), (0, 1)),
}


@dataclass(frozen=True)
class DropUnusedResults(TracedPass[Context]):
    """Requires values on all nodes; ensures rule 1. ``inputs``: the names of the tangents' nodes, of fixed sizes."""

    inputs: tuple[str, ...] = ()
    name = "drop-unused-results"

    def requires(self, gm: GraphModule, context: Context) -> str | None:
        missing = set(self.inputs) - {node.name for node in gm.graph.find_nodes(op="placeholder")}
        return f"there are no inputs {sorted(missing)}" if missing else None

    def run(self, gm: GraphModule, context: Context) -> Result:
        if not self.inputs:
            return Result(0)
        dropped = [node for node in gm.graph.find_nodes(op="placeholder") if node.name in self.inputs]
        zeros, writer = set(dropped), GraphWriter(gm.graph, context.mode)
        for node in list(gm.graph.nodes):
            if _is_zeros(node, zeros):
                zeros.add(node)
            else:
                _add(node, zeros, writer)
        _write(gm, zeros, writer)
        for node in reversed(list(gm.graph.nodes)):
            if node in zeros:
                gm.graph.erase_node(node)
        gm.graph.eliminate_dead_code()
        return Result(len(dropped), {"dropped": len(dropped)})

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        left = set(self.inputs) & {node.name for node in gm.graph.find_nodes(op="placeholder")}
        return f"inputs {sorted(left)} are still there" if left else None


def _is_zeros(node: Node, zeros: set[Node]) -> bool:
    """Rule 2, and the sum of zeros and zeros."""
    value = node.meta.get("val")
    if not (isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)):
        return False
    if node.target is aten.add.Tensor:
        return all(argument in zeros for argument in node.args[:2])
    return any(at < len(node.args) and node.args[at] in zeros for at in LINEAR.get(node.target, ()))


def _add(node: Node, zeros: set[Node], writer: GraphWriter) -> None:
    """Rule 3, if one term is zeros and the other has the result's shape and layout."""
    if node.target is not aten.add.Tensor or node.kwargs or not any(term in zeros for term in node.args[:2]):
        return
    other, value = node.args[int(node.args[0] in zeros)], node.meta["val"]
    if not isinstance(other, Node) or _form(other.meta["val"]) != _form(value):
        return
    with node.graph.inserting_before(node):
        rest = writer.in_dtype(other, value.dtype)
    node.replace_all_uses_with(rest)
    node.graph.erase_node(node)


def _form(value: Tensor) -> tuple[list[str], torch.layout]:
    """Return the sizes, and whether it is sparse. Sizes are text, because comparing symbolic sizes would add guards."""
    return list(map(str, value.shape)), value.layout


def _write(gm: GraphModule, zeros: set[Node], writer: GraphWriter) -> None:
    """Rule 4."""
    for node in list(gm.graph.nodes):
        readers = [reader for reader in node.users if reader not in zeros] if node in zeros else []
        if not readers:
            continue
        first = next(reader for reader in gm.graph.nodes if reader in readers)
        with gm.graph.inserting_before(first):
            written = _zeros(node, writer)
        for reader in readers:
            reader.replace_input_with(node, written)


def _zeros(node: Node, writer: GraphWriter) -> Node:
    """Return a new node of zeros with the node's shape, strides, dtype and device."""
    value: Tensor = node.meta["val"]
    options: dict[str, Any] = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    if value.is_contiguous():
        return writer.call(aten.full.default, list(value.shape), 0, near=node, **options)
    flat = writer.call(aten.full.default, [spanned_elements(value)], 0, near=node, **options)
    return writer.call(aten.as_strided.default, flat, list(value.shape), list(value.stride()), near=node)


def spanned_elements(value: Tensor) -> int:
    """Return how many elements of memory a tensor of these sizes and strides spans."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return last + 1 if value.numel() else 0
