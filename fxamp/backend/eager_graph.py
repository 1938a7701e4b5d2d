"""What a graph needs to run without AOTAutograd: :func:`run_eagerly` makes its checkpoints and Functions eager ones."""

from torch.fx import GraphModule

from fxamp.backend.eager_checkpoints import keep_random_numbers
from fxamp.backend.eager_functions import save_for_second_backward


def run_eagerly(gm: GraphModule) -> None:
    """Let ``gm`` give the gradients of an eager program; nothing analyses the graph from here on."""
    save_for_second_backward(gm)
    keep_random_numbers(gm)
