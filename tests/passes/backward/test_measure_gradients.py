"""The pass measure-gradients on tiny backward graphs."""

import pytest
import torch
from backward_graphs import backward_graph, mode_of
from support.checks.bench_graph import assert_unchanged, golden_pass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from fxamp.graph import GraphWriter
from fxamp.passes.backward.measure_gradients import MeasureGradients
from fxamp.passes.base import Context
from fxamp.passes.shared.magnitude_writer import MagnitudeWriter


def test_each_gradient_on_the_way_is_measured() -> None:
    gm = backward_graph(lambda x, w: torch.relu(x.half() @ w.half()).float().exp(), *(_leaf(), _leaf()))
    record = golden_pass(
        "backward/measure-gradients", gm, Context(mode_of(gm)), MeasureGradients(), "nothing says what is measured"
    )
    assert record.modified


def test_a_graph_without_floating_values_does_not_change() -> None:
    gm = backward_graph(lambda x, w: torch.relu(x @ w), _leaf(), _leaf())
    for node in list(gm.graph.nodes):
        node.meta["val"] = node.meta["val"].long() if isinstance(node.meta.get("val"), torch.Tensor) else None
    assert_unchanged(gm, Context(mode_of(gm)), MeasureGradients())


def _leaf() -> torch.Tensor:
    return torch.ones(2, 2, requires_grad=True)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("device", "ops"), [("cpu", 1), ("meta", 2)])
def test_rows_are_reduced_first_where_they_are_read_together(device: str, ops: int, traced: bool) -> None:
    mode, graph = FakeTensorMode(), Graph()
    value = graph.placeholder("value")
    with mode:
        value.meta["val"] = torch.empty(4, 64, dtype=torch.float16, device=device)
    number = MagnitudeWriter(GraphWriter(graph, mode), traced).magnitude(value)
    reductions = [node for node in graph.nodes if "amax" in str(node.target) or "norm" in str(node.target)]
    assert len(reductions) == ops and number.meta["val"].shape == () and number.meta["val"].dtype is torch.float32
