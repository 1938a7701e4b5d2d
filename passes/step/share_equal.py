"""share-equal: compute equal values once, by torch's common subexpression elimination (CSE).

A step computes ``1 - beta`` again for every parameter.
"""

from dataclasses import dataclass

from torch.fx import GraphModule

from fxamp.passes.base import Context, Pass, Result
from fxamp.torch_private.parts.fx import fx_graph_cse


@dataclass(frozen=True)
class ShareEqual(Pass[Context]):
    """Requires a functional graph, whose only writes are final ``copy_`` to inputs; inputs and order do not change."""

    name = "share-equal"

    def run(self, gm: GraphModule, context: Context) -> Result:
        shared = fx_graph_cse(gm.graph)
        shared.eliminate_dead_code()
        dropped = len(gm.graph.nodes) - len(shared.nodes)
        if dropped:
            gm.graph = shared
        return Result(dropped)
