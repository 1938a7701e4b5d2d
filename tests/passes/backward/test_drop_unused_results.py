"""The pass drop-unused-results on tiny backward graphs: it gives what zeros would give, and reads none."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from backward_graphs import backward_graph, mode_of
from support.checks.equality import assert_equal
from torch import Tensor
from torch.fx import GraphModule

from fxamp.capture import Captured
from fxamp.errors import PassError
from fxamp.passes.backward.drop_unused_results import DropUnusedResults
from fxamp.passes.backward.scale_backward import tangents
from fxamp.passes.base import Context
from fxamp.pipeline import run_passes

aten = torch.ops.aten


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def loss_and_logits(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    logits = (x.half() @ w.half()).float()
    return logits.logsumexp(-1).sum(), logits


def chain(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    hidden = x.tanh()
    rows = hidden[1:].select(0, 0).expand(2, 4).clone()
    return hidden.t() @ w, (hidden - w).unsqueeze(0), (hidden * 2 - w).half(), rows


def broadcast(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(0) + w[0], x.cumsum(0).t()


def normed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of two gradients of the norm is dense; the term that is left alone is expanded."""
    hidden = torch.nn.functional.group_norm(x.view(1, 4, 4), 2, w[0], w[1])
    return hidden.sum(-1), hidden


def projected(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the product is read through a view."""
    hidden = torch.nn.functional.linear(x.view(2, 2, 4), w)
    return hidden.sum(0), hidden


def looked_up(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """One gradient of ``x`` is sparse; its sum with a dense one is dense."""
    rows = torch.nn.functional.embedding(torch.tensor([1, 3, 1]), x, sparse=True)
    return (x * w).sum(), rows, x @ w


PROGRAMS = [loss_and_logits, chain, broadcast, normed, projected, looked_up]


def drop(gm: GraphModule, *names: str) -> int:
    mode = mode_of(gm)
    (record,) = run_passes(Captured(gm, mode), Context(mode), DropUnusedResults(names))
    return record.modified


def called(gm: GraphModule) -> Counter[Any]:
    return Counter(node.target for node in gm.graph.nodes if node.op == "call_function")


def values(gm: GraphModule) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        drawn = torch.randn(value.shape, dtype=torch.float32).to(value.dtype)
        tensors[node.name] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(drawn)
    return tensors


@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_those_that_zeros_give(program: Callable[..., Any]) -> None:
    """For every choice of results that are used."""
    gm = backward_graph(program, leaf(4, 4), leaf(4, 4))
    names = [node.name for node in tangents(gm)]
    for chosen in range(1, 2 ** len(names)):
        unused = [name for at, name in enumerate(names) if not chosen >> at & 1]
        dropped, inputs = deepcopy(gm), values(gm)
        assert drop(dropped, *unused) == len(unused)
        zeroed = {name: torch.zeros_like(value) if name in unused else value for name, value in inputs.items()}
        expected = gm(*zeroed.values())
        results = dropped(*(value for name, value in inputs.items() if name not in unused))
        for ours, theirs in zip(results, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                assert_equal(ours, theirs)
                assert ours.stride() == theirs.stride()


def test_unused_logits_leave_nothing_behind() -> None:
    gm = backward_graph(loss_and_logits, leaf(4, 4), leaf(4, 4))
    drop(gm, tangents(gm)[1].name)
    assert aten.full.default not in called(gm) and aten.add.Tensor not in called(gm)


@pytest.mark.parametrize("used", range(3))
def test_what_is_left_is_the_backward_of_the_used_result(used: int) -> None:
    """Ops that are linear in a dropped gradient go, and so do sums of zeros. Each result depends on both inputs."""
    gm = backward_graph(chain, leaf(4, 4), leaf(4, 4))
    drop(gm, *(node.name for at, node in enumerate(tangents(gm)) if at != used))
    alone = backward_graph(lambda x, w: chain(x, w)[used], leaf(4, 4), leaf(4, 4))
    assert called(gm) == called(alone)


def test_an_op_without_a_rule_reads_zeros() -> None:
    gm = backward_graph(broadcast, leaf(4, 4), leaf(4, 4))
    drop(gm, tangents(gm)[1].name)
    assert aten.full.default in called(gm)


def test_without_names_nothing_changes_and_unknown_ones_are_refused() -> None:
    gm = backward_graph(loss_and_logits, leaf(4, 4), leaf(4, 4))
    assert drop(gm) == 0
    with pytest.raises(PassError, match="there are no inputs \\['tangents_9'\\]"):
        drop(gm, "tangents_9")
