"""Every node of what torch prints is read as it is in the graph that was printed."""

from itertools import product
from typing import Any

import torch
from printed_graphs import PROGRAMS, Mlp, graphs_of
from support.checks.exhaustive import each_once
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from fxamp.graph import dtype_name, op_name
from fxamp.graph_text import Entry, Listing
from fxamp.graph_text.parse import parse_text


def expected_target(node: Node) -> str | None:
    """The name that the text allows to tell; None for a function outside of torch: its module's name is not printed."""
    local = node.op == "call_function" and not isinstance(node.target, (OpOverload, HigherOrderOperator))
    module = getattr(node.target, "__module__", None) or "torch"
    known = module.partition(".")[0] in ("torch", "_operator", "builtins", "math")
    return None if local and not known else op_name(node)


def compare(gm: GraphModule, listing: Listing) -> int:
    """Hold the entries of ``listing`` against the nodes of ``gm``; returns how many there were."""
    count = 0
    for node, entry in zip(gm.graph.nodes, listing.entries, strict=True):
        count += 1
        assert entry.kind == node.op and (entry.name == node.name or node.op == "output")
        assert list(entry.inputs) == [source.name for source in node.all_input_nodes], entry
        target = expected_target(node)
        assert (entry.source is not None) == sourced(node), entry
        assert target is None or entry.target == target
        compare_types(node, entry)
        for attribute in entry.bodies:
            count += compare(getattr(gm, attribute), listing.bodies[attribute])
    return count


def compare_types(node: Node, entry: Entry) -> None:
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, torch.Tensor) and node.op not in ("output", "get_attr"):
        (tensor,) = entry.values
        assert tensor.dtype == dtype_name(value.dtype)
        assert list(map(str, tensor.shape)) == list(map(str, value.shape))
        assert tensor.device in ("", str(value.device))
    elif isinstance(value, torch.SymInt):
        assert entry.symbol == str(value)


def sourced(node: Node) -> bool:
    """Whether torch prints the user's line of a node; it does so for what is computed."""
    return node.op not in ("placeholder", "output") and bool(node.stack_trace)


@each_once("name, dynamic", PROGRAMS, [False, True])
def test_every_node_is_read_with_and_without_strides_and_devices(name: str, dynamic: bool) -> None:
    graphs = graphs_of(*PROGRAMS[name], dynamic=dynamic)
    assert [stage for stage, _ in graphs] == ["dynamo", "joint", "forward", "backward"]

    for (stage, gm), details in product(graphs, (False, True)):
        text = gm.print_readable(print_output=False, include_stride=details, include_device=details)
        (listing,) = parse_text(text, "graph.txt").graphs

        assert compare(gm, listing) >= 5
        # Their inputs identify a joint graph and a backward.
        assert listing.stage == (stage if stage in ("joint", "backward") else "")
        assert any(entry.source is not None and entry.source.file.endswith(".py") for entry in listing.entries)


def test_exported_and_symbolically_traced_graphs_are_read() -> None:
    exported = torch.export.export(Mlp(), (torch.ones(3, 4),)).module()
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))

    for gm in (exported, traced):
        (listing,) = parse_text(gm.print_readable(print_output=False), "graph.py").graphs
        by_name: dict[str, Any] = {entry.name: entry for entry in listing.entries}
        for node in gm.graph.nodes:
            if node.op.startswith("call") and node.name in by_name:
                assert by_name[node.name].kind == node.op
                assert list(by_name[node.name].inputs) == [source.name for source in node.all_input_nodes]
        calls = [node.name for node in gm.graph.nodes if node.op in ("call_function", "call_module")]
        assert set(calls) <= set(by_name) | {"_guards_fn"} and len(calls) >= 2
