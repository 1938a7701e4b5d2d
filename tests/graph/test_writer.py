"""The graph writer keeps the books: values, places in the program, reasons."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from fxamp.graph import INSERTED, GraphWriter, computed, recompute

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


def test_a_call_has_a_value_a_place_and_a_reason(writer: GraphWriter) -> None:
    _, node = product(writer)
    node.meta["stack_trace"] = 'File "net.py", line 3, in forward'
    cast = writer.call(aten.to.dtype, node, torch.bfloat16, near=node, why="for a test", name="cast")
    assert cast.meta["val"].dtype is torch.bfloat16 and cast.meta["val"].shape == (2, 3)
    assert cast.meta["stack_trace"] == node.meta["stack_trace"]
    assert cast.meta[INSERTED] == "for a test" and cast.name == "cast"
    assert INSERTED not in node.meta


def test_values_are_made_without_autocast_and_gradients(writer: GraphWriter) -> None:
    x, _ = product(writer)
    x.meta["val"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        node = writer.call(aten.matmul.default, x, writer.call(aten.t.default, x))
    assert node.meta["val"].dtype is torch.float32 and not node.meta["val"].requires_grad


def test_a_copy_reads_other_nodes(writer: GraphWriter) -> None:
    x, node = product(writer)
    half = writer.in_dtype(x, torch.float16)
    copy = writer.copy(node, {x: half})
    assert copy.args == (half, half) and copy.meta["val"].dtype is torch.float16
    assert writer.in_dtype(half, torch.float16) is half
    assert writer.on_device(half, torch.device("cpu")) is half


def test_inputs_go_last_or_before_another(writer: GraphWriter, graph: Graph) -> None:
    cpu = torch.device("cpu")
    first = writer.input("first", dtype=torch.float32, device=cpu)
    writer.input("last", 4, dtype=torch.float32, device=cpu)
    writer.input("zeroth", dtype=torch.float32, device=cpu, before=first)
    assert [node.name for node in graph.nodes] == ["zeroth", "first", "last"]


def test_an_op_that_refuses_says_why_and_keeps_its_value(writer: GraphWriter) -> None:
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
