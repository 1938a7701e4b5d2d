"""add-in-place: add the products of a loss in chunks to one buffer, instead of a new sum for each chunk.

1. ``fxamp::add_product`` writes to its ``total`` if the graph computes that and does not read its memory later.
2. No value changes. The pass runs on the forward and the backward after the partition. In the joint graph, the
   partitioner would consider the last product cheap to recompute, and save its operands for the backward.
"""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter
from fxamp.graph.aliases import memory_readers
from fxamp.kernels import chunk_sums as chunk_sums  # registers the ops
from fxamp.passes.base import Context, Result, TracedPass, broken_by


@dataclass(frozen=True)
class AddInPlace(TracedPass[Context]):
    """Requires a forward or a backward of AOTAutograd's; ensures rule 1."""

    name = "add-in-place"

    def run(self, gm: GraphModule, context: Context) -> Result:
        writer, changed = GraphWriter(gm.graph, context.mode), 0
        for node in _sums(gm):
            if _can_be_written(node):
                *_, total = node.args
                assert isinstance(total, Node)
                with gm.graph.inserting_before(node):
                    writer.call(torch.ops.fxamp.add_product_.default, *node.args, near=node)
                node.replace_all_uses_with(total)
                gm.graph.erase_node(node)
                changed += 1
        return Result(changed, {"in place": changed})

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        return broken_by("not added in place", filter(_can_be_written, _sums(gm)))


def _sums(gm: GraphModule) -> list[Node]:
    return list(gm.graph.find_nodes(op="call_function", target=torch.ops.fxamp.add_product.default))


_PRODUCTS = (torch.ops.fxamp.wide_product.default, torch.ops.fxamp.add_product.default)


def _can_be_written(node: Node) -> bool:
    *factors, total = node.args
    if not isinstance(total, Node) or total.target not in _PRODUCTS or total in factors:
        return False
    readers = list(memory_readers(total))
    return readers.count(node) == 1 and all(reader <= node for reader in readers)
