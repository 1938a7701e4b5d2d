"""Prepare a graph to run without AOTAutograd: its checkpoints and Functions become those that eager programs call."""

from torch.fx import GraphModule

from fxamp.backend.eager_checkpoints import use_eager_checkpoints
from fxamp.backend.eager_functions import use_eager_functions
from fxamp.capture import VERBATIM
from fxamp.graph import all_nodes
from fxamp.graph.higher_order_ops import inner_graphs


def prepare_eager_graph(gm: GraphModule) -> None:
    """Change ``gm``, so that it gives the gradients of an eager program; nothing analyses the graph after this."""
    for node in all_nodes(gm):
        if inner_graphs(node):
            node.meta.pop(VERBATIM, None)  # afterwards nothing shows that fxamp looked inside
    use_eager_functions(gm)
    use_eager_checkpoints(gm)
