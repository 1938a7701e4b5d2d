from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from support.checks.bench_graph import policy, workbench

from fxamp.passes.forward.annotate_rules import AnnotateRules
from fxamp.passes.forward.insert_casts import InsertCasts
from fxamp.passes.shared.decision import decision
from fxamp.policy import Category, Rule

PASSES = (AnnotateRules(), InsertCasts())


def test_inputs_get_the_dtypes_of_their_rule_and_the_rest_follows() -> None:
    bench = workbench(lambda a, w: (a.mm(w) + 1).exp(), torch.ones(2, 3), torch.ones(3, 2))
    result = bench.golden("insert-casts", *PASSES)
    assert result.counts["inserted"] == 3


def test_annotate_rules_must_come_first() -> None:
    bench = workbench(lambda a: a.mm(a), torch.ones(2, 2))
    assert "annotate-rules" in (InsertCasts().requires(bench.captured.module, bench.context) or "")


def test_a_weight_is_cast_once_and_an_activation_once_a_use() -> None:
    def program(w: torch.Tensor) -> torch.Tensor:
        hidden = w.relu()
        return hidden.mm(w) + hidden.mm(w)

    bench = workbench(program, torch.ones(2, 2, requires_grad=True))
    result = bench.golden("insert-casts-sharing", *PASSES)
    assert result.counts == {"inserted": 3, "shared": 1, "cast back": 0}


def ones(dtype: torch.dtype = torch.float32, leaf: bool = False) -> torch.Tensor:
    return torch.ones(2, 2, dtype=dtype, requires_grad=leaf)


def in_a_body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The weight's cast is shared in the body too, as it needs a gradient; the other value's is not."""
    hidden = (x + 1).relu()
    return torch.utils.checkpoint.checkpoint(lambda h, v: h.mm(v) + h.mm(v), hidden, w, use_reentrant=False)


def written_without_gradients(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What the write returns is ``x``, which needs a gradient."""
    with torch.no_grad():
        doubled = x.mul_(2)
    hidden = doubled.relu()
    return hidden.mm(w) + hidden.mm(w)


def written_at_the_end(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """One cast of ``x`` serves both, as under autocast: its gradients are added in 16 bits."""
    result = x.mm(w) + x.mm(w)
    with torch.no_grad():
        x.mul_(2)
    return result


def learned_in_a_part(w: torch.Tensor) -> torch.Tensor:
    """The write to a view gives the whole a gradient: it is cast for each use."""
    x = torch.zeros(2, 2)
    x[0].add_(w[0])
    return x.mm(w) + x.mm(w)


def learned_before_it_is_read(w: torch.Tensor) -> torch.Tensor:
    """So is what is computed from the whole after that write."""
    x = torch.zeros(2, 2)
    x[0].add_(w[0])
    y = x / 2
    return y.mm(w) + y.mm(w)


def read_before_it_learns(w: torch.Tensor) -> torch.Tensor:
    """What was computed before the write has no gradient: one cast serves both of its uses."""
    x = torch.zeros(2, 2)
    y = x + 1
    x[0].add_(w[0])
    return x.mm(w) + y.mm(w) + y.mm(w)


#: A program, its inputs, and how many casts are inserted and shared.
CASTS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[int, int]]] = {
    "nothing to cast": (lambda a: (a + 1).relu(), (ones(),), (0, 0)),
    "float64 and integers": (lambda a, i: (a.exp(), i + 1), (ones(torch.float64), ones(torch.int64)), (0, 0)),
    "no gradient": (lambda a: a.relu().mm(a) + a.relu().mm(a), (ones(),), (3, 1)),
    "tensors of two dtypes, each by itself": (
        lambda a, w: torch.atleast_3d(a.mm(w), a)[0].relu(), (ones(), ones()), (2, 0)
    ),
    "a leaf of the other 16 bits, whose gradients may not fit": (
        lambda a, w: a.mm(w) + a.mm(w), (ones(torch.float16, True), ones(torch.float16)), (3, 1)
    ),
    "a weight that float() gave back": (lambda w, a: a.mm(w) + a.mm(w.float()), (ones(leaf=True), ones()), (2, 2)),
    "a weight that to() gave back": (lambda w, a: a.mm(w) + a.mm(w.to("cpu")), (ones(leaf=True), ones()), (2, 2)),
    "a weight that type_as() gave back": (lambda w, a: a.mm(w) + a.mm(w.type_as(a)), (ones(leaf=True), ones()), (2, 2)),
    "written without gradients": (written_without_gradients, (ones(leaf=True), ones(leaf=True)), (3, 1)),
    "written at the end": (written_at_the_end, (ones(leaf=True), ones(leaf=True)), (2, 2)),
    "learned in a part": (learned_in_a_part, (ones(leaf=True),), (3, 1)),
    "learned before it is read": (learned_before_it_is_read, (ones(leaf=True),), (3, 1)),
    "read before it learns": (read_before_it_learns, (ones(leaf=True),), (3, 3)),
    "in a body": (in_a_body, (ones(leaf=True), ones(leaf=True)), (3, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASTS)
def test_how_many_casts_a_program_needs(name: str) -> None:
    program, inputs, (inserted, shared) = CASTS[name]
    bench = workbench(program, *inputs)
    before = bench.text
    counts = bench.run(*PASSES).counts
    assert (counts.get("inserted", 0), counts.get("shared", 0)) == (inserted, shared)
    assert inserted or bench.text == before


def test_a_cast_is_not_shared_over_a_write() -> None:
    def program(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first = a.mm(w)
        a.view(-1).add_(1)
        return first + a.mm(w)

    bench = workbench(program, torch.ones(2, 2), torch.ones(2, 2))
    bench.golden("insert-casts-write", *PASSES)
    again = bench.captured.module(torch.ones(2, 2), torch.ones(2, 2))
    assert torch.equal(again.float() if isinstance(again, torch.Tensor) else again[0].float(), torch.full((2, 2), 6.0))


@pytest.mark.parametrize(
    "part",
    [
        lambda a: a.split(1)[0],
        lambda a: a.unbind()[0],
        lambda a: torch.broadcast_tensors(a, a)[0],
        lambda a: torch.nn.functional.dropout(a, 0.5, training=False),
        lambda a: torch.atleast_3d(a),
    ],
    ids=["split", "unbind", "broadcast_tensors", "dropout", "atleast_3d"],
)
def test_a_write_through_any_view_is_seen(part) -> None:
    def program(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first = a.mm(w)
        part(a).add_(1)
        return first + a.mm(w)

    w = torch.eye(2)
    bench = workbench(program, torch.ones(2, 2), w)
    bench.run(*PASSES)
    (result,) = bench.captured.module(torch.ones(2, 2), w)
    assert torch.equal(result.float(), program(torch.ones(2, 2), w))


def test_a_cast_made_without_gradients_does_not_serve_where_they_are_needed() -> None:
    def program(w: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = a.mm(w)
        return a.mm(w) - shift

    weight = torch.ones(2, 2, requires_grad=True)
    bench = workbench(program, weight, torch.ones(2, 2))
    bench.run(*PASSES)
    (result,) = bench.captured.module(weight, torch.ones(2, 2))
    result.sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0))


def test_the_widest_type_wins_in_a_promoting_op() -> None:
    bench = workbench(lambda a: torch.cat([a.mm(a), a]), torch.ones(2, 2))
    bench.golden("insert-casts-promote", *PASSES)
    (result,) = bench.captured.module(torch.ones(2, 2))
    assert result.dtype is torch.float32


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda a: torch.zeros(2, 2).index_put_((torch.tensor([0]),), a.mm(a)[0]), id="index_put_"),
        pytest.param(lambda a: torch.zeros(2, 2).masked_scatter_(a > 0, a.mm(a)), id="masked_scatter_"),
        pytest.param(lambda a: torch.lerp(a, a.mm(a), 0.5), id="lerp"),
        pytest.param(lambda a: torch.index_add(a, 0, torch.tensor([0, 1]), a.mm(a)), id="index_add"),
        pytest.param(lambda a: torch.linalg.inv(a.mm(a)), id="inv"),
        pytest.param(lambda a: torch.scatter_add(a, 0, (a > 9).long(), a.mm(a)), id="scatter_add"),
    ],
)
def test_what_an_op_would_refuse_is_cast_back(program) -> None:
    a = torch.ones(2, 2) + torch.eye(2)
    bench = workbench(program, a)
    result = bench.run(*PASSES)
    assert result.counts["cast back"] >= 1
    out = bench.captured.module(a)
    value = out[0] if isinstance(out, tuple) else out
    torch.testing.assert_close(value.float(), program(a))


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda a: a.mm(a)[None].bmm(a[None]), id="bmm"),
        pytest.param(lambda a: torch.addmm(a, a.mm(a), a), id="addmm"),
        pytest.param(lambda a: torch.nn.functional.linear(a.mm(a), a, a[0]), id="linear"),
    ],
)
def test_what_autocast_casts_but_no_rule_gets_the_widest_captured_dtype(program) -> None:
    a = torch.tensor([[1.01, 2.0], [3.0, 4.0]])
    rules = policy(Rule("products", Category.LOWER_PRECISION_FP, ("mm",)))
    bench = workbench(program, a, under=rules, ambient=torch.bfloat16)
    assert bench.run(*PASSES).counts["cast back"] == 1
    (result,) = bench.captured.module(a)
    narrow = a.bfloat16()
    with mock.patch.object(torch.Tensor, "mm", lambda *_: torch.mm(narrow, narrow).float()):
        assert torch.equal(result, program(a))


@pytest.mark.parametrize("weight, casts", [(torch.tensor(0.3), 0), (torch.full((2, 2), 0.3), 2)])
def test_lerp_takes_a_weight_without_dimensions_in_any_dtype(weight: torch.Tensor, casts: int) -> None:
    a = torch.ones(2, 2) + torch.eye(2)
    bench = workbench(lambda a, weight: torch.lerp(a.mm(a), a.mm(a) * 2, weight), a, weight)
    assert bench.run(*PASSES).counts["cast back"] == casts
    bench.captured.module(a, weight)


def test_a_rule_that_an_op_cannot_follow_is_overruled_and_logged() -> None:
    rules = policy(Rule("low", Category.LOWER_PRECISION_FP, ("linalg_inv",)))
    bench = workbench(lambda a: torch.linalg.inv(a), torch.eye(2), under=rules)
    bench.run(*PASSES)
    (node,) = [n for n in bench.captured.module.graph.nodes if n.op == "call_function"]
    choice = decision(node)
    assert choice is not None and choice.rule is not None and "16-bit kernel" in choice.overruled


def test_running_statistics_are_never_cast() -> None:
    rules = policy(Rule("low", Category.LOWER_PRECISION_FP, ("batch_norm",)))
    norm = torch.nn.BatchNorm1d(2)
    bench = workbench(norm, torch.ones(4, 2), under=rules)
    bench.run(*PASSES)
    (node,) = [n for n in bench.captured.module.graph.nodes if "batch_norm" in str(n.target)]
    assert all(n.op == "placeholder" for n in node.args[3:5])


class _Write(torch._ops.HigherOrderOperator):
    """Writes twice its first argument to its second, as a Triton kernel's launch may."""

    def __init__(self) -> None:
        super().__init__("fxamp_test_write")

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.dtype is target.dtype is torch.float32
        target.copy_(2 * source)


def test_what_an_opaque_node_writes_is_not_lost() -> None:
    graph = torch.fx.Graph()
    a = graph.placeholder("a")
    product = graph.call_function(torch.ops.aten.mm.default, (a, a))
    result = graph.call_function(torch.ops.aten.empty_like.default, (product,))
    graph.call_function(_Write(), (product, result))
    graph.output((result,))
    bench = workbench(torch.fx.GraphModule(torch.nn.Module(), graph), torch.ones(2, 2))
    bench.golden("insert-casts-opaque-write", *PASSES)
    (value,) = bench.captured.module(torch.ones(2, 2))
    assert torch.equal(value, torch.full((2, 2), 4.0, dtype=torch.bfloat16))


def test_set_dtype_leaves_the_input_and_an_explicit_dtype_wins() -> None:
    rules = policy(
        Rule("low", Category.LOWER_PRECISION_FP, ("mm",)), Rule("sum", Category.FP32_SET_OPT_DTYPE, ("sum",))
    )
    bench = workbench(lambda a: (a.mm(a).sum(), a.mm(a).sum(dtype=torch.float64)), torch.ones(2, 2), under=rules)
    bench.golden("insert-casts-set-dtype", *PASSES)
    results = bench.captured.module(torch.ones(2, 2))
    assert [result.dtype for result in results] == [torch.float32, torch.float64]


def test_append_dtype_calls_the_overload_that_takes_one() -> None:
    rules = policy(
        Rule("low", Category.LOWER_PRECISION_FP, ("mm",)), Rule("norm", Category.FP32_APPEND_DTYPE, ("norm",))
    )
    bench = workbench(lambda a: torch.ops.aten.norm.Scalar(a.mm(a)), torch.ones(2, 2), under=rules)
    bench.golden("insert-casts-append-dtype", *PASSES)
    (result,) = bench.captured.module(torch.ones(2, 2))
    assert result.dtype is torch.float32


def test_values_are_the_policys_not_those_of_the_autocast_that_it_was_captured_under() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(x @ x, x @ x)

    products = policy(Rule("products", Category.LOWER_PRECISION_FP, ("matmul",)))
    bench = workbench(loss, torch.ones(2, 2), under=products, ambient=torch.bfloat16)
    bench.run(AnnotateRules(), InsertCasts())
    [node] = [node for node in bench.captured.module.graph.nodes if "mse_loss" in node.name]
    assert node.meta["val"].dtype is torch.bfloat16  # as it runs
