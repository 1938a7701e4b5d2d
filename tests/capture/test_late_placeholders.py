"""Dynamo 2.11 puts a size that a selective checkpoint reads after the checkpoint, among the calls."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from fxamp.capture.aten_trace import trace_aten


def test_a_placeholder_among_the_calls_is_moved_ahead_of_them() -> None:
    graph, mode = Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    total = graph.call_function(torch.add, (x, x))
    late = graph.placeholder("late")
    total.args = (x, late)
    graph.output((total,))
    fakes = [mode.from_tensor(torch.ones(2)), mode.from_tensor(torch.ones(2))]  # type: ignore[no-untyped-call]
    traced = trace_aten(GraphModule({}, graph), fakes, mode)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "placeholder", "call_function", "output"]
