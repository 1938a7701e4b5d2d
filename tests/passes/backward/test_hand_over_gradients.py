"""hand-over-gradients on the backward of a small program: golden, what stays, and running twice."""

import pytest
import torch
from backward_graphs import backward_graph
from support.checks.golden_text import assert_golden
from torch import Tensor
from torch.fx import GraphModule

from fxamp.errors import PassError
from fxamp.graph import format_graph, graph_output
from fxamp.passes.backward.hand_over_gradients import HANDED_OVER, HandOverGradients
from fxamp.pipeline import run_traced
from fxamp.policy import Policy

POLICY = Policy.load("cpu-bfloat16")


def program(x: Tensor, weight: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
    return ((x @ weight.t()).tanh() * factor + shift).sum()


def backward() -> GraphModule:
    inputs = [torch.ones(4, 8), torch.ones(2, 8), torch.ones(2), torch.ones(2)]
    return backward_graph(program, *[value.requires_grad_() for value in inputs])


@pytest.mark.parametrize(("name", "group"), [("hand-over-gradients", 1), ("hand-over-gradients-at-the-end", 1 << 20)])
def test_golden(name: str, group: int) -> None:
    gm = backward()
    before = format_graph(gm)
    run_traced(gm, POLICY, HandOverGradients((1, 2, 3), group))
    assert_golden(f"passes/{name}", f"before\n{before}\n\nafter\n{format_graph(gm)}")
    output = graph_output(gm.graph)
    assert sorted(output.meta[HANDED_OVER]) == [1, 2, 3]
    assert [value is None for value in output.args[0]] == [False, True, True, True]  # type: ignore[union-attr]


def test_no_place_changes_nothing_and_twice_is_once() -> None:
    gm = backward()
    before = format_graph(gm)
    run_traced(gm, POLICY, HandOverGradients((), 1))
    assert format_graph(gm) == before and HANDED_OVER not in graph_output(gm.graph).meta
    run_traced(gm, POLICY, HandOverGradients((1, 2), 1))
    once = format_graph(gm)
    run_traced(gm, POLICY, HandOverGradients((1, 2), 1))
    assert format_graph(gm) == once != before


def test_a_graph_without_descriptors_is_an_error() -> None:
    gm = backward()
    del graph_output(gm.graph).meta["desc"]
    with pytest.raises(PassError, match=r"hand-over-gradients.* the outputs carry no descriptors"):
        run_traced(gm, POLICY, HandOverGradients((1,), 1))
