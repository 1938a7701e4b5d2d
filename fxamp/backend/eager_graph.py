"""What a graph needs to run without AOTAutograd: :func:`run_eagerly` makes its checkpoints and Functions eager ones."""

from torch.fx import GraphModule

from fxamp.backend.eager_checkpoints import keep_random_numbers
from fxamp.backend.eager_functions import save_for_second_backward
from fxamp.capture import VERBATIM
from fxamp.graph import all_nodes
from fxamp.graph.higher_order_ops import inner_graphs


def run_eagerly(gm: GraphModule) -> None:
    """Let ``gm`` give the gradients of an eager program; nothing analyses the graph from here on."""
    for node in all_nodes(gm):
        if inner_graphs(node):
            node.meta.pop(VERBATIM, None)  # afterwards nothing shows that fxamp looked inside
    save_for_second_backward(gm)
    keep_random_numbers(gm)
