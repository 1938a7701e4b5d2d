"""Give the bodies of a cond or a loop operands that share no memory: AOTAutograd refuses those that do.

Dynamo passes one value under two names as two operands, such as ``h`` and ``F.dropout(h, training=False)``. In fxamp's
graph the value is one node (:mod:`fxamp.capture.distinct_results`), so all operands but the first become copies.
"""

from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node, map_arg

from fxamp.capture.autocast_state import AUTOCAST
from fxamp.graph import inherit_provenance
from fxamp.graph.opaque_writes import is_functional

_REFUSING = frozenset({"cond", "map_impl", "scan", "while_loop"})


def part_operands(node: Node, mode: FakeTensorMode) -> None:
    """Replace repeated tensor operands of ``node`` by copies, if it is a cond or a loop whose bodies write to nothing.

    ``mode`` owns the values. Bodies that write keep their operands, because a write to a copy would be lost.
    """
    refusing = isinstance(node.target, HigherOrderOperator) and node.target._name in _REFUSING
    if not (refusing and is_functional(node)):
        return
    seen: set[Node] = set()
    before = node.args, node.kwargs

    def operand(source: Node) -> Node:
        if source not in seen or not isinstance(source.meta.get("val"), Tensor):
            seen.add(source)
            return source
        with node.graph.inserting_before(node):
            copy: Node = node.graph.call_function(torch.ops.aten.clone.default, (source,))
        inherit_provenance(copy, node)
        copy.meta[AUTOCAST] = node.meta[AUTOCAST]
        with mode:
            copy.meta["val"] = source.meta["val"].clone()
        return copy

    first, *others = node.args  # the predicate, or a body
    node.args, node.kwargs = (first, *map_arg(others, operand)), map_arg(node.kwargs, operand)
    if (node.args, node.kwargs) != before:
        owner: Any = node.graph.owning_module
        owner.recompile()
