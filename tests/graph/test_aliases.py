"""Which values of a graph may share memory, compared with the memory that they have when the graph runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.bench_graph import captured_by_dynamo
from torch import Tensor
from torch.fx import Interpreter, Node
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fxamp.graph import AliasSets, graph_output, writes
from fxamp.graph.aliases import alias_of, aliased_inputs


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor]:
        return a * 2, a.view_as(a)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first * 2 + second


def outputs_of(body: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(body, *args, use_reentrant=False)


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "new": lambda x, w: (x @ w, x + 1),
    "views": lambda x, w: (x.t(), x[0], x.view(-1), x.clone()),
    "picks": lambda x, w: (*x.split(2), x.chunk(2)[0]),
    "several results": lambda x, w: (x.max(0)[0], x.max(0)[1], x.min(0)[0]),
    "in place": lambda x, w: (h := x * 1, h.add_(1), h[0]),
    "conversions": lambda x, w: (x.float(), x.double(), x.to(w), x.contiguous()),
    "checkpoint": lambda x, w: (h := x.tanh(), outputs_of(lambda a: a @ w, h)),
    "checkpoint of views": lambda x, w: (h := x.tanh(), outputs_of(lambda a: (a[0], a, a * 2), h)),
    "checkpoint of related results": lambda x, w: outputs_of(lambda a: (b := a * 2, b[0], a + 1), x),
    "function": lambda x, w: (h := x.tanh(), Doubled.apply(h)),
    "cond": lambda x, w: (h := x.tanh(), torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (h,))),
}


class Memory(Interpreter):
    """Runs a graph and keeps every result."""

    def run_node(self, n: Node) -> Any:
        self.results = {**getattr(self, "results", {}), n: super().run_node(n)}
        return self.results[n]


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_that_share_memory_are_known_to(name: str) -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    captured, inputs = captured_by_dynamo(PROGRAMS[name], x, w)
    gm = captured.module
    memory = Memory(gm)
    memory.run(*[value.detach() if isinstance(value, Tensor) else value for value in inputs])
    sets = AliasSets(gm.graph)
    outputs = [leaf for leaf in pytree.tree_leaves(graph_output(gm.graph).args[0]) if isinstance(leaf, Node)]
    exact = 0
    for a in outputs:
        for b in outputs:
            real = memory.results[a].untyped_storage()._cdata == memory.results[b].untyped_storage()._cdata
            assert sets.shared(a, b) or not real, (a, b)
            exact += sets.shared(a, b) == real
    assert exact == len(outputs) ** 2


def body_writes(x: Tensor, w: Tensor) -> Tensor:
    buffer = w.detach().clone()

    def body(a: Tensor) -> Tensor:
        buffer.add_(1)
        return a * 2

    return outputs_of(body, x) + buffer


def test_a_body_writes_to_what_it_writes_to_alone() -> None:
    gm = captured_by_dynamo(body_writes, torch.randn(4, 4, requires_grad=True), torch.randn(4, 4))[0].module
    (node,) = [node for node in gm.graph.nodes if "checkpoint" in str(node.target)]
    (written,) = writes(node)
    assert written.target is torch.ops.aten.clone.default


def test_one_tensor_under_two_nodes() -> None:
    def program(x: Tensor, w: Tensor) -> Any:
        h = x * 1
        return h.add_(1), h.view(-1), outputs_of(lambda a: (a, a[0]), h)

    gm = captured_by_dynamo(program, torch.randn(4, 4, requires_grad=True), torch.randn(4, 4))[0].module
    nodes = {node.name: node for node in gm.graph.nodes}
    in_place = next(node for node in nodes.values() if node.target is torch.ops.aten.add_.Tensor)
    view = next(node for node in nodes.values() if node.target is torch.ops.aten.view.default)
    same, part = [node for node in nodes.values() if node.name.startswith("getitem")][:2]
    assert alias_of(in_place) is in_place.args[0]
    assert alias_of(view) is None and aliased_inputs(view) == [view.args[0]]
    assert alias_of(same) is in_place
    assert alias_of(part) is None and in_place in aliased_inputs(part)
