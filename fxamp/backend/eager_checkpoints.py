"""Checkpoints in a graph that runs eagerly: recompute with the random numbers and buffers of the forward.

In a graph a checkpoint is an op of torch's that relies on AOTAutograd and Inductor for random numbers and writes.
Without them it draws new random numbers in the backward, so gradients would not belong to the results' dropout.
It also saves the buffers that are its inputs, which autograd rejects if a batch norm has written to them. Here the
backward reads the buffers as they were before the forward and drops what it writes, as AOTAutograd does.
"""

from itertools import count
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint, noop_context_fn

from fxamp.capture.autocast_state import regions_closed_on_error
from fxamp.graph import AliasSets, all_graphs

#: In ``meta`` of a checkpoint's body: the indices of the operands that it writes to.
_WRITTEN = "fxamp_written"


def use_eager_checkpoints(gm: GraphModule) -> None:
    """Replace each checkpoint in ``gm`` and in its bodies by the one that eager programs call, with the same options.

    Afterwards ``gm`` can run, but :func:`fxamp.graph.higher_order_ops.bodies` does not recognize these nodes.
    """
    op = torch.ops.higher_order.tag_activation_checkpoint
    modules = list(dict.fromkeys(all_graphs(gm)))
    nodes = [(module, node) for module in modules for node in module.graph.find_nodes(op="call_function", target=op)]
    for module, node in nodes:
        body = module.get_submodule(node.args[0].target)
        assert isinstance(body, GraphModule)
        sets = AliasSets(body.graph)
        inputs = body.graph.find_nodes(op="placeholder")
        body.meta[_WRITTEN] = [index for index, value in enumerate(inputs) if sets.mutated(value)]
    for module, node in nodes:
        node.target = _checkpoint
        module.recompile()


def _checkpoint(body: GraphModule, *operands: Any, **options: Any) -> Any:
    state = {index: operands[index] for index in body.meta[_WRITTEN] if not operands[index].requires_grad}
    before = {index: value.clone() for index, value in state.items()}
    runs = count()

    def run(*others: Any) -> Any:
        values = state if next(runs) == 0 else {index: value.clone() for index, value in before.items()}
        rest = iter(others)
        with regions_closed_on_error():  # torch ends a recomputation early by an exception
            return body(*(values[index] if index in values else next(rest) for index in range(len(operands))))

    others = [operand for index, operand in enumerate(operands) if index not in state]
    # Dynamo keeps the contexts of a selective checkpoint on the body.
    contexts = body.meta.get("_checkpoint_context_fn", noop_context_fn)
    return checkpoint(run, *others, **options | {"use_reentrant": False, "context_fn": contexts})
