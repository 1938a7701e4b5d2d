"""The work of capture, of every pass and of fxamp-show grows as the graph does: counted in calls, not in seconds."""

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from fxamp.capture import Captured, capture
from fxamp.graph_text.write import write_listing
from fxamp.passes.base import CastContext
from fxamp.passes.sequences import FORWARD
from fxamp.pipeline import run_passes
from fxamp.policy import Policy
from fxamp.reports.list_graph import list_graph
from fxamp.tools.bench.host.steps import count_calls
from fxamp.tools.show import command as show

WIDTH = 8
SIZES = (6, 18)
#: Work for each block of the longer chain over that of the shorter one; work for whole graphs makes it less than 1.
LIMIT = 1.1
POLICY = Policy.load("cpu-bfloat16").resolve("cpu")


def chain(blocks: int) -> tuple[GraphModule, list[Any]]:
    """Blocks of a transformer in a row: each op reads the result of the one before, one of them in place."""
    graph = Graph()
    x, weight, bias, scale = (graph.placeholder(name) for name in ("x", "weight", "bias", "scale"))
    for _ in range(blocks):
        residual = x
        x = graph.call_function(F.layer_norm, (x, (WIDTH,), scale, bias))
        x = graph.call_function(F.linear, (x, weight, bias))
        x = graph.call_function(torch.matmul, (x, weight))
        x = graph.call_function(torch.Tensor.mul_, (x, 0.5))
        x = graph.call_function(torch.softmax, (x, -1))
        x = graph.call_function(torch.reshape, (x, (WIDTH, -1)))
        x = graph.call_function(F.gelu, (x,))
        x = graph.call_function(torch.reshape, (x, (-1, WIDTH)))
        x = graph.call_function(operator.add, (x, residual))
    graph.output((x,))
    with FakeTensorMode():
        shapes = ((16, WIDTH), (WIDTH, WIDTH), (WIDTH,), (WIDTH,))
        inputs = [torch.empty(shape, requires_grad=True) for shape in shapes]
    return GraphModule(torch.nn.Module(), graph), inputs


def captured(blocks: int) -> Captured:
    return capture(*chain(blocks))


def steps_of(blocks: int) -> dict[str, int]:
    module, inputs = chain(blocks)
    counts = {"capture": count_calls(lambda: capture(module, inputs))}
    graph = captured(blocks)
    context = CastContext(graph.mode, POLICY)
    for step in FORWARD:
        counts[step.name] = count_calls(lambda step=step: run_passes(graph, context, step))
    return counts


def test_capture_and_passes_take_no_more_for_each_op_of_a_longer_graph() -> None:
    steps_of(2)  # what torch caches at first
    shorter, longer = (steps_of(blocks) for blocks in SIZES)
    growth = {name: longer[name] / shorter[name] * SIZES[0] / SIZES[1] for name in shorter}
    assert {name: ratio for name, ratio in growth.items() if ratio > LIMIT} == {}


def test_show_takes_no_more_for_each_op_of_a_longer_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for blocks in (2, *SIZES):
        graph, file = captured(blocks), tmp_path / "graph.py"
        run_passes(graph, CastContext(graph.mode, POLICY), *FORWARD)
        listing = list_graph(graph.module, stage="cast", policy=POLICY.name, device="cpu")
        file.write_text(write_listing(listing), encoding="utf-8")
        counts.append(count_calls(lambda file=file: show.main([str(file)])))
    _, shorter, longer = counts
    assert longer / shorter * SIZES[0] / SIZES[1] <= LIMIT


def test_work_that_grows_faster_is_seen() -> None:
    def pairs(size: int) -> None:
        for first in range(size):
            for second in range(size):
                operator.add(first, second)

    assert count_calls(lambda: pairs(32)) / count_calls(lambda: pairs(8)) > LIMIT * 4
