"""What a graph with a scaled backward hands out."""

import torch
from torch.fx import GraphModule

from fxamp.capture import OUTPUT_DTYPES
from fxamp.graph import graph_output
from fxamp.passes.base import all_graphs
from fxamp.passes.shared.autocast_regions import ENTER
from fxamp.policy import Policy


def widen_outputs(gm: GraphModule, policy: Policy, ambient: torch.dtype | None) -> None:
    """Let results that autocast would hand out in 16 bits be handed out in float32, if gradients may flow back.

    Gradients are true outside a graph, and one for a float16 result is a float16 tensor: it would underflow before the
    graph can scale it. A program that autocast has no part in, by ``ambient`` or by regions inside, means the dtypes
    that it hands out.
    """
    marked = any(node.target is ENTER for graph in all_graphs(gm) for node in graph.graph.nodes)
    if not torch.is_grad_enabled() or (ambient is None and not marked):
        return
    lower = getattr(torch, policy.lower_precision_fp)
    meta = graph_output(gm.graph).meta
    meta[OUTPUT_DTYPES] = [torch.float32 if dtype == lower else dtype for dtype in meta[OUTPUT_DTYPES]]
