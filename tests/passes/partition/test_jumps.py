"""Which ops that a backward recomputes from a saved value count as jumps, in graphs written by hand."""

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fxamp.passes.shared.recomputed_jumps import mark_jumps
from fxamp.passes.shared.saved_values import JUMP, Jump

aten = torch.ops.aten


def graph(function: Callable[..., Any]) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(torch.ones(4, 4))


def jump(backward: GraphModule) -> Jump | None:
    """The jump of the value that a forward saves for ``backward``, after a result."""
    forward = graph(lambda x: (x.sum(), x * 2.0))
    mark_jumps(forward, backward, 1)
    (product,) = forward.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    found: Jump | None = product.meta.get(JUMP)
    return found


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("floor", lambda x: (x * 3).floor()),
        ("floor", lambda x: aten.floor.default(x[:2].float().sum(0).exp())),
        ("fmod", lambda x: x.fmod(2.0)),
        ("floor_divide", lambda x: x // 2.0),
        ("div", lambda x: torch.div(x, 2.0, rounding_mode="floor")),
        ("round", lambda x: x.round(decimals=2)),
        ("hardshrink", lambda x: torch.nn.functional.hardshrink(x)),
        ("threshold", lambda x: torch.nn.functional.threshold(x, 0.5, 0.0)),
        ("gt", lambda x: x > 0.5),
        ("gt", lambda x: x - 1 > 0),
        ("lt", lambda x: x < x.mean()),
        ("argmax", lambda x: x.argmax(-1)),
        ("max", lambda x: x.max(-1)[1]),
        ("topk", lambda x: x.topk(2)[1]),
        ("sort", lambda x: x.sort(-1)[1]),
        ("bucketize", lambda x: torch.bucketize(x, torch.arange(4.0))),
        ("linalg_solve_triangular", lambda x: torch.linalg.solve_triangular(x.mT, torch.ones(4, 1), upper=False)),
        ("cholesky_solve", lambda x: torch.cholesky_solve(torch.ones(4, 1), x)),
        ("heaviside", lambda x: torch.heaviside(x - 1, torch.ones(()))),
        ("_to_copy", lambda x: x.to(torch.int64)),
        ("_to_copy", lambda x: (x - 1).bool()),
    ],
)
def test_ops_that_jump_anywhere(op: str, function: Callable[[Tensor], Tensor]) -> None:
    assert jump(graph(function)) == Jump(op)


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("gt", lambda x: x > 0),
        ("ne", lambda x: x.half().t() != 0),
        ("sign", lambda x: x.reshape(2, 8).sign()),
        ("_to_copy", lambda x: x.bool()),
        ("logical_not", lambda x: x.logical_not()),
    ],
)
def test_ops_that_jump_where_the_saved_value_is_zero(op: str, function: Callable[[Tensor], Tensor]) -> None:
    assert jump(graph(function)) == Jump(op, at_zero=True)


def test_a_jump_elsewhere_counts_more_than_one_at_zero() -> None:
    assert jump(graph(lambda x: (x > 0, x > 1))) == Jump("gt")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clamp(-1, 1).relu().exp(),
        lambda x: torch.nn.functional.threshold(x, 0.0, 0.0),
        lambda x: x.max(-1)[0],
        lambda x: x.isinf(),
        lambda x: x == x,
        lambda x: x.abs() < inf,
        lambda x: torch.where(x == -inf, 0.0, x),
        lambda x: torch.zeros_like(x, dtype=torch.int32) + 1,
        lambda x: torch.linalg.solve_triangular(torch.eye(4), x, upper=False),
        lambda x: x.new_ones(3) > 2,
        lambda x: torch.arange(x.shape[0]) > 2,
    ],
)
def test_continuous_functions_and_what_survives_do_not_count(function: Callable[[Tensor], Tensor]) -> None:
    assert jump(graph(function)) is None


def test_the_backwards_own_ops_do_not_count() -> None:
    backward = graph(lambda x: x.floor() > 2)
    for node in backward.graph.nodes:
        node.meta["partitioner_tag"] = "is_backward"
    assert jump(backward) is None


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("eq", lambda x: (x == x.amax(-1, keepdim=True)).sum(-1)),
        ("eq", lambda x: ((x - 1).abs() == x.sum()) * 2.0),
        ("ne", lambda x: (x != x.t()).to(x.dtype)),
        ("_cdist_backward", lambda x: aten._cdist_backward(x, x, x, inf, x)),
        (None, lambda x: aten._cdist_backward(x, x, x, 2.0, x)),
        (None, lambda x: torch.where(~(x == x.t()), x, 2.0)),
        (None, lambda x: (x == 2.0).sum()),
    ],
)
def test_equalities_that_the_backward_itself_counts(op: str | None, function: Callable[[Tensor], Tensor]) -> None:
    backward = graph(function)
    for node in backward.graph.nodes:
        node.meta["partitioner_tag"] = "is_backward"
    assert jump(backward) == (None if op is None else Jump(op))


@pytest.mark.parametrize(
    ("before", "op"), [(aten.softplus.default, None), (aten.isclose.default, "isclose"), (aten.gt.Scalar, "gt")]
)
def test_comparisons_inside_a_continuous_op_do_not_count(before: OpOverload, op: str | None) -> None:
    backward = graph(lambda x: x > 20)
    (comparison,) = backward.graph.find_nodes(op="call_function", target=aten.gt.Scalar)
    comparison.meta["original_aten"] = before
    assert jump(backward) == (None if op is None else Jump(op))
