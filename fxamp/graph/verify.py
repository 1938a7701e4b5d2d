"""Checks that every graph must pass after every pass."""

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxamp.graph.nodes import all_graphs, all_nodes
from fxamp.graph.tensor_wrappers import fake_mode_of


def verify(gm: GraphModule) -> None:
    """Raise ``RuntimeError`` unless the graph is well-formed and every ATen node carries its value.

    Well-formed means that ``torch.fx.Graph.lint`` accepts it: topological order, existing targets, no foreign nodes. An
    ATen call that returns anything must hold a ``meta["val"]``, because later passes read its types there.
    """
    for graph in all_graphs(gm):
        graph.graph.lint()
    for node in all_nodes(gm):
        if node.op != "call_function":
            continue
        if isinstance(node.target, OpOverload) and node.target._schema.returns and "val" not in node.meta:
            raise RuntimeError(f"node {node.name} ({node.target}) carries no value")
        leaves = pytree.tree_leaves(node.meta.get("val"))
        if any(isinstance(leaf, torch.Tensor) and fake_mode_of(leaf) is None for leaf in leaves):
            raise RuntimeError(f"node {node.name} ({node.target}) holds a real tensor as its value")
