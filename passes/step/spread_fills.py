"""spread-fills: replace a tensor that holds one number everywhere by a 0-dim tensor.

``full``, ``zeros``, ``ones`` and their ``_like`` forms lose their sizes: the ops that read them broadcast a 0-dim
value. After this pass a pointwise program's graph names no size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter
from fxamp.passes.base import Context, Pass, Result, broken_by

aten = torch.ops.aten

#: Ops that fill, and the number that they fill with.
FILLS: dict[Any, Callable[[Node], Any]] = {
    aten.full.default: lambda node: node.args[1],
    aten.full_like.default: lambda node: node.args[1],
    aten.fill.Scalar: lambda node: node.args[1],
    aten.zeros.default: lambda node: 0,
    aten.zeros_like.default: lambda node: 0,
    aten.ones.default: lambda node: 1,
    aten.ones_like.default: lambda node: 1,
}


@dataclass(frozen=True)
class SpreadFills(Pass[Context]):
    """Ensures that ``full`` without a dimension is the only op that fills."""

    name = "spread-fills"

    def run(self, gm: GraphModule, context: Context) -> Result:
        fills = _sized(gm)
        writer = GraphWriter(gm.graph, context.mode)
        for node in fills:
            value = node.meta["val"]
            with gm.graph.inserting_before(node):
                number = FILLS[node.target](node)
                spread = writer.call(aten.full.default, [], number, dtype=value.dtype, device=value.device)
            node.replace_all_uses_with(spread)
            gm.graph.erase_node(node)
        if fills:
            gm.graph.eliminate_dead_code()
        return Result(len(fills))

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        return broken_by("filled tensors are left", _sized(gm))


def _sized(gm: GraphModule) -> list[Node]:
    nodes = (node for node in gm.graph.nodes if node.target in FILLS)
    values = ((node, node.meta.get("val")) for node in nodes)
    return [n for n, v in values if isinstance(v, Tensor) and (v.dim() or n.target is not aten.full.default)]
