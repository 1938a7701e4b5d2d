"""The graph writer keeps the books: values, places in the program, reasons."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from fxamp.graph import GraphWriter, computed, recompute

aten = torch.ops.aten


@pytest.fixture
def graph() -> Graph:
    return Graph()


@pytest.fixture
def writer(graph: Graph) -> GraphWriter:
    return GraphWriter(graph, FakeTensorMode())


def product(writer: GraphWriter) -> tuple[Node, Node]:
    x = writer.input("x", 2, 3, dtype=torch.float32, device=torch.device("cpu"))
    return x, writer.call(aten.mul.Tensor, x, x)


def test_values_are_made_without_autocast_and_gradients(writer: GraphWriter) -> None:
    x, _ = product(writer)
    x.meta["val"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        node = writer.call(aten.matmul.default, x, writer.call(aten.t.default, x))
    assert node.meta["val"].dtype is torch.float32 and not node.meta["val"].requires_grad


def test_an_op_that_raises_has_a_reason_and_keeps_its_value(writer: GraphWriter) -> None:
    x, node = product(writer)
    before = node.meta["val"]
    y = writer.input("y", 5, dtype=torch.float32, device=torch.device("cpu"))
    node.args = (x, y)
    with writer._mode:
        why = recompute(node)
        assert why is not None and why.startswith("the op rejects: ") and "\n" not in why
        assert node.meta["val"] is before
        node.args = (x, x)
        assert recompute(node) is None and computed(node).shape == (2, 3)
