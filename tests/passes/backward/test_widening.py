"""A 16-bit gradient that a backward widens is read in 16 bits through the same views as after the cast."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Interpreter

from fxamp.graph import GraphWriter
from fxamp.passes.shared.widening import before_widening, erase_unused

aten, prims = torch.ops.aten, torch.ops.prims


@pytest.mark.parametrize("widens", [True, False])
def test_views_of_a_widened_gradient_are_those_of_the_narrow_one(widens: bool) -> None:
    graph = Graph()
    writer = GraphWriter(graph, FakeTensorMode())
    narrow = writer.input("g", 2, 3, dtype=torch.bfloat16, device=torch.device("cpu"))
    wide = writer.call(prims.convert_element_type.default, narrow, torch.float32 if widens else torch.float64)
    view = writer.call(aten.unsqueeze.default, writer.call(aten.t.default, wide), 0)
    source = before_widening(view, writer.call)
    assert (source is view) is not widens
    graph.output(source)
    erase_unused(view)
    gradient = torch.arange(6.0).view(2, 3).bfloat16()
    result: Tensor = Interpreter(torch.fx.GraphModule({}, graph)).run(gradient)
    assert torch.equal(result, gradient.t()[None].to(result.dtype)) and result.dtype == source.meta["val"].dtype
    assert len(graph.find_nodes(op="call_function", target=prims.convert_element_type.default)) == (not widens)
