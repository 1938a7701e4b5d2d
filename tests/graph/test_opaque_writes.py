"""Which higher-order ops may write to their operands, and which share memory with them."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.bench_graph import captured_by_dynamo
from support.machines.lacks import needs_writing_loops
from torch import Tensor
from torch._higher_order_ops import scan, while_loop
from torch._ops import HigherOrderOperator
from torch.fx import Node
from torch.nn import functional as F

from fxamp.graph import AliasSets, writes
from fxamp.graph.opaque_writes import is_functional

map_ = torch._higher_order_ops.map


def turns(body: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Three turns of a loop; what ``body`` returns is not used."""

    def turn(i: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        body(v)
        return i + 1, v * 0.5

    return while_loop(lambda i, v: (i < 3) & (v.sum() < 1e9), turn, (torch.tensor(0), x))[1]


READING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "scan": lambda x, w: scan(lambda v, u: (v * w[0] + u, v + u), x[0] * 2, x),
    "map": lambda x, w: map_(lambda v: v.tanh() * w[0], x),
    "loop": lambda x, w: turns(lambda v: v @ w, x),
    "branch": lambda x, w: turns(lambda v: torch.cond(v.sum() < 1e9, lambda: w * 2, lambda: w * 1), x),
}

WRITING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "method": lambda x, w: turns(lambda v: w.mul_(2), x),
    "operator": lambda x, w: turns(lambda v: operator.imul(w, 2), x),
    "operator's method": lambda x, w: turns(lambda v: w.__imul__(2), x),
    "item": lambda x, w: turns(lambda v: w.__setitem__(0, 1.0), x),
    "view": lambda x, w: turns(lambda v: w[0].add_(1), x),
    "out": lambda x, w: turns(lambda v: torch.add(w, w, out=w), x),
    "argument": lambda x, w: turns(lambda v: F.relu(w, inplace=True), x),
    "statistics": lambda x, w: turns(lambda v: F.batch_norm(v, w[0], w[1], training=True), x),
    "branch": lambda x, w: turns(lambda v: torch.cond(v.sum() < 1e9, lambda: w.mul_(2) * 1, lambda: w * 1), x),
}


def higher_order_node(program: Callable[..., Any], *inputs: Tensor) -> Node:
    """Return the only higher-order node of the captured program."""
    graph = captured_by_dynamo(program, *inputs)[0].module.graph
    (node,) = [node for node in graph.nodes if isinstance(node.target, HigherOrderOperator)]
    return node


@pytest.mark.parametrize("name", READING)
def test_a_body_that_does_not_write(name: str) -> None:
    node = higher_order_node(READING[name], torch.randn(4, 4, requires_grad=True), torch.randn(4, 4))
    assert is_functional(node) and not writes(node)
    sets = AliasSets(node.graph)
    assert not any(sets.shared(result, source) for result in node.users for source in node.all_input_nodes)


@needs_writing_loops
@pytest.mark.parametrize("name", WRITING)
def test_a_body_that_writes(name: str) -> None:
    x, w = torch.ones(4, 4), torch.full((4, 4), -1.0)
    with torch.no_grad():
        node = higher_order_node(WRITING[name], x, w)
    assert not torch.equal(w, torch.full((4, 4), -1.0))
    assert not is_functional(node) and [source.name for source in writes(node)] == ["l_w_"]
