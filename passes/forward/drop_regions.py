"""drop-regions: remove the marks of autocast regions after every cast is explicit.

The marks would cause a second cast. Marks for devices other than the policy's stay, and so do those inside calls that
are left verbatim.
"""

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxamp.capture import VERBATIM
from fxamp.graph import ENTER_AUTOCAST, all_graphs
from fxamp.passes.base import CastContext, GraphwisePass, broken_by
from fxamp.passes.shared.autocast_regions import concerns, erase_region


@dataclass(frozen=True)
class DropRegions(GraphwisePass[CastContext]):
    """Requires inserted casts; ensures that no mark for the policy's device remains, except in verbatim calls."""

    name = "drop-regions"

    def rewrite(self, gm: GraphModule, context: CastContext) -> int:
        marks = _marks(gm, context)
        for mark in marks:
            erase_region(mark)
        return len(marks)

    def ensures(self, gm: GraphModule, context: CastContext) -> str | None:
        return broken_by("marks left", (mark for graph in all_graphs(gm) for mark in _marks(graph, context)))


def _marks(gm: GraphModule, context: CastContext) -> list[Node]:
    marks = (node for node in gm.graph.nodes if node.target is ENTER_AUTOCAST and VERBATIM not in node.meta)
    return [mark for mark in marks if concerns(mark, context)]
