"""fold-casts: remove pairs of inserted casts that lose nothing.

1. ``d -> w -> d`` with ``w`` wider than ``d`` returns the same bits: the second cast's users read the value itself. A
   pair that rounds (``float32 -> bfloat16 -> float32``) stays.
2. Only casts that fxamp inserted are considered; a cast in the user's program is never removed.
3. The first cast must have no other user, because the gradient would change; and nothing may write to the value.
"""

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from fxamp.graph import AliasSets, all_graphs, tensor_value
from fxamp.passes.base import CastContext, GraphwisePass, broken_by
from fxamp.passes.shared.decision import inserted_for
from fxamp.torch_dtypes import NARROW

#: Pairs of dtypes: every value of the first dtype is a value of the second.
_LOSSLESS = {
    *((narrow, wide) for narrow in NARROW for wide in (torch.float32, torch.float64)),
    (torch.float32, torch.float64),
}


@dataclass(frozen=True)
class FoldCasts(GraphwisePass[CastContext]):
    """Requires values on all nodes; ensures that no pair remains that rules 1 to 3 allow to remove."""

    name = "fold-casts"
    counted = "folded"

    def rewrite(self, gm: GraphModule, context: CastContext) -> int:
        pairs = _pairs(gm.graph)
        for first, second in pairs:
            source = first.args[0]
            assert isinstance(source, Node)
            second.replace_all_uses_with(source)
            gm.graph.erase_node(second)
            gm.graph.erase_node(first)
        return len(pairs)

    def ensures(self, gm: GraphModule, context: CastContext) -> str | None:
        left = (second for graph in all_graphs(gm) for _, second in _pairs(graph.graph))
        return broken_by("casts left to fold", left)


def _pairs(graph: Graph) -> list[tuple[Node, Node]]:
    candidates = [pair for node in graph.nodes if (pair := _pair(node)) is not None]
    if not candidates:
        return []
    aliases = AliasSets(graph)
    return [(first, second) for first, second in candidates if not aliases.mutated(first.args[0])]  # type: ignore[arg-type]


def _pair(second: Node) -> tuple[Node, Node] | None:
    first = second.args[0] if _is_inserted_cast(second) else None
    if not isinstance(first, Node) or not _is_inserted_cast(first) or len(first.users) != 1:
        return None
    source, wide, result = tensor_value(first.args[0]), tensor_value(first), tensor_value(second)
    if source is None or wide is None or result is None:
        return None
    return (first, second) if source.dtype == result.dtype and (source.dtype, wide.dtype) in _LOSSLESS else None


def _is_inserted_cast(node: Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.aten.to.dtype and inserted_for(node) is not None
