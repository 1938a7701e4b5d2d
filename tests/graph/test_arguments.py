"""Arguments by name, whichever way a call passes them."""

import torch
from torch.fx import Graph

from fxamp.graph import argument, arguments, set_argument

aten = torch.ops.aten


def test_by_position_by_keyword_and_by_default() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.sum.dim_IntList, (x, [0]), {"dtype": torch.float32})
    assert {found.name: value for found, value in arguments(node)} == {
        "self": x,
        "dim": [0],
        "keepdim": False,
        "dtype": torch.float32,
    }
    assert argument(node, "keepdim") is False
    assert argument(node, "correction") is None


def test_an_argument_is_set_where_it_is_passed() -> None:
    graph = Graph()
    node = graph.call_function(aten.sum.dim_IntList, (graph.placeholder("x"), [0]))
    set_argument(node, "dim", [1])
    set_argument(node, "dtype", torch.float32)
    set_argument(node, "keepdim", True)
    assert node.args[1] == [1]
    assert node.kwargs == {"dtype": torch.float32, "keepdim": True}
