"""A Function that returns one tensor twice is refused, as Dynamo captures writes to a result before torch 2.12."""

import pytest
import torch
from torch.fx import Graph, GraphModule

from fxamp.capture.function_writes import require_separate_results
from fxamp.errors import CaptureError


def body(returned: str) -> GraphModule:
    """A forward that clones its input and writes to the clone twice; ``returned`` names its results."""
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_method("clone", (x,))
    exp = graph.call_method("exp_", (y,))
    nodes = {"x": x, "y": y, "mul": graph.call_method("mul_", (exp, 2)), "sin": graph.call_method("sin", (y,))}
    results = tuple(nodes[name] for name in returned.split())
    graph.output((results, (y,)))
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("returned", ["y mul", "mul y", "sin y mul"])
def test_what_is_returned_twice_is_named(returned: str) -> None:
    with pytest.raises(CaptureError, match=r"writes to its result clone in place.*accepted: torch 2\.12"):
        require_separate_results(body(returned))


@pytest.mark.parametrize("returned", ["y", "mul", "x mul", "sin mul"])
def test_separate_results_are_accepted(returned: str) -> None:
    require_separate_results(body(returned))
