"""keep-autocast: run verbatim calls under the autocast that they were captured under.

fxamp does not look into these calls (torch.func transforms, most higher-order ops), so it inserts no casts into them,
and they may be valid only under autocast (a product of bfloat16 and float32). The rest of the graph runs without
autocast.

1. Neighbouring calls that were captured under one dtype share a region.
2. Calls whose result is not a tensor need no region.
3. Where autocast was off, it stays off.
"""

from dataclasses import dataclass
from itertools import groupby

import torch
from torch.fx import GraphModule, Node

from fxamp.capture import VERBATIM, is_verbatim
from fxamp.graph import ENTER_AUTOCAST, EXIT_AUTOCAST, fake_tensors
from fxamp.passes.base import CastContext, GraphwisePass
from fxamp.passes.shared.autocast_regions import outermost, walk


@dataclass(frozen=True)
class KeepAutocast(GraphwisePass[CastContext]):
    """Requires the marks of the program's regions; ensures that kept calls run in a region of the captured dtype."""

    name = "keep-autocast"

    def rewrite(self, gm: GraphModule, context: CastContext) -> int:
        walked = [(node, here.captured) for node, here in walk(gm, context, outermost(context))]
        pairs = [(node, dtype if is_verbatim(node) else None) for node, dtype in walked if node.op != "get_attr"]
        added = 0
        for dtype, group in groupby(pairs, key=lambda pair: pair[1]):
            nodes = [node for node, _ in group]
            enclosed = nodes[0].target is ENTER_AUTOCAST  # by an earlier run of the pass
            if dtype is None or enclosed or not any(fake_tensors(node.meta.get("val")) for node in nodes):
                continue
            _enclose(nodes, context.policy.device, dtype)
            added += 1
        return added


def _enclose(nodes: list[Node], device: str, dtype: torch.dtype) -> None:
    graph = nodes[0].graph
    with graph.inserting_before(nodes[0]):
        enter = graph.call_function(ENTER_AUTOCAST, (device, dtype, True, False))
    with graph.inserting_after(nodes[-1]):
        leave = graph.call_function(EXIT_AUTOCAST, (enter,))
    for mark in (enter, leave):
        mark.meta.update({"val": None, VERBATIM: "for what is left verbatim"})
