"""Checkpoints in a graph that runs eagerly: computed again with the random numbers of the forward.

In a graph a checkpoint is an op of torch's that leaves random numbers to AOTAutograd and Inductor. Run without them, it
draws new ones in the backward: gradients would belong to another dropout than the results.
"""

from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint, noop_context_fn


def keep_random_numbers(gm: GraphModule) -> None:
    """Replace each checkpoint in ``gm`` and in its bodies by the one that eager programs call, with the same options.

    Afterwards ``gm`` is for running, not for analysis: :func:`fxamp.graph.higher_order.bodies` no longer finds these.
    """
    for module in list(gm.modules()):
        if isinstance(module, GraphModule):
            _replace_in(module)


def _replace_in(gm: GraphModule) -> None:
    op = torch.ops.higher_order.tag_activation_checkpoint
    found = gm.graph.find_nodes(op="call_function", target=op)
    for node in found:
        node.target = _checkpoint
    if found:
        gm.recompile()


def _checkpoint(body: GraphModule, *operands: Any, **options: Any) -> Any:
    # Dynamo keeps the contexts of a selective checkpoint on the body.
    contexts = body.meta.get("_checkpoint_context_fn", noop_context_fn)
    return checkpoint(body, *operands, **options | {"use_reentrant": False, "context_fn": contexts})
