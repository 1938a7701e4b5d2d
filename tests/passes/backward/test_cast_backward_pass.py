"""The pass cast-backward on tiny backward graphs: golden texts, contract, and what it leaves alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from backward_graphs import backward_graph, mode_of
from support.checks.golden_text import assert_golden
from torch import Tensor
from torch.fx import GraphModule

from fxamp.capture import Captured
from fxamp.graph import format_graph, graph_output, op_name
from fxamp.passes.backward.cast_backward import CastBackward
from fxamp.passes.base import CastContext
from fxamp.passes.shared.decision import decision, inserted_for
from fxamp.pipeline import run_passes
from fxamp.policy import Category, Policy, Rule
from fxamp.reports import PassRecord

LOW, FP32 = Category.LOWER_PRECISION_FP, Category.FP32


def run(gm: GraphModule, *rules: Rule) -> PassRecord:
    mode = mode_of(gm)
    policy = replace(Policy.load("cpu-bfloat16").resolve(), rules=rules)
    (record,) = run_passes(Captured(gm, mode), CastContext(mode, policy), CastBackward())
    return record


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype, requires_grad=True)


def product(x: Tensor, w: Tensor) -> Tensor:
    """A 16-bit product of a 16-bit input and a float32 weight."""
    return (x @ w.bfloat16().t()).relu()


def chain(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).exp() @ w


def wide(*ops: str, **more: Any) -> Rule:
    return Rule("wide", FP32, ops, region="backward", why="for a test", **more)


def test_products_in_float32() -> None:
    gm = backward_graph(product, leaf(2, 3, dtype=torch.bfloat16), leaf(4, 3))
    before = format_graph(gm)
    record = run(gm, wide("mm"))
    assert record.counts["covered"] == 2
    after = format_graph(gm)
    assert_golden("passes/cast_backward_products", f"before\n{before}\n\nafter\n{after}")
    assert run(gm, wide("mm")).modified == 0 and format_graph(gm) == after
    dtypes = [node.meta["val"].dtype for node in graph_output(gm.graph).args[0]]
    assert dtypes == [torch.float32, torch.bfloat16]  # those of the leaves w and x, as before


def test_between_covered_ops_nothing_is_rounded() -> None:
    gm = backward_graph(chain, leaf(2, 2, dtype=torch.bfloat16), leaf(2, 2, dtype=torch.bfloat16))
    before = format_graph(gm)
    run(gm, wide("mm", "mul", "t"))
    assert_golden("passes/cast_backward_chain", f"before\n{before}\n\nafter\n{format_graph(gm)}")
    casts = [node for node in gm.graph.nodes if inserted_for(node)]
    down = [node for node in casts if node.meta["val"].dtype is torch.bfloat16]
    assert all(user.op == "output" or user.target is torch.ops.aten.add.Tensor for node in down for user in node.users)


def test_without_a_match_the_graph_stays_as_it_is() -> None:
    gm = backward_graph(product, leaf(2, 3, dtype=torch.bfloat16), leaf(4, 3))
    before = format_graph(gm)
    assert run(gm, wide("exp"), Rule("forward", FP32, ("mm",))).modified == 0
    assert format_graph(gm) == before
    assert all(decision(node) is None for node in gm.graph.nodes)


def test_ops_that_run_as_asked_already_are_covered_without_a_cast() -> None:
    gm = backward_graph(lambda x, w: x @ w, leaf(2, 2), leaf(2, 2))
    before = format_graph(gm)
    record = run(gm, wide("mm"))
    assert format_graph(gm) == before and record.counts == {"covered": 2, "inserted": 0}


def test_what_is_computed_again_is_not_the_backwards() -> None:
    gm = backward_graph(chain, leaf(2, 2, dtype=torch.bfloat16), leaf(2, 2, dtype=torch.bfloat16))
    products = [node for node in gm.graph.nodes if op_name(node) == "aten::mm.default"]
    products[0].meta["partitioner_tag"] = "is_forward"
    run(gm, wide("mm"))
    assert decision(products[0]) is None and products[0].meta["val"].dtype is torch.bfloat16
    assert all(node.meta["val"].dtype is torch.float32 for node in products[1:])


def test_a_refusal_is_recorded_and_leaves_no_cast() -> None:
    gm = backward_graph(product, leaf(2, 3, dtype=torch.bfloat16), leaf(4, 3))
    before = format_graph(gm)
    run(gm, wide("mm", inputs={"mat2": "follow"}))
    assert format_graph(gm) == before
    decisions = [decision(node) for node in gm.graph.nodes if op_name(node) == "aten::mm.default"]
    assert ["must have one dtype" in decided.overruled for decided in decisions if decided] == [True, True]


def test_the_losers_are_recorded() -> None:
    gm = backward_graph(product, leaf(2, 3, dtype=torch.bfloat16), leaf(4, 3))
    low = Rule("low", LOW, ("m*",), region="both")
    run(gm, low, wide("mm"))
    decisions = [decision(node) for node in gm.graph.nodes if op_name(node) == "aten::mm.default"]
    assert [(decided.rule.id, decided.lost) for decided in decisions if decided and decided.rule] == [
        ("wide", (low,))
    ] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_float64_is_never_cast(dtype: torch.dtype) -> None:
    gm = backward_graph(lambda x, w: x @ w, leaf(2, 2, dtype=dtype), leaf(2, 2, dtype=dtype))
    run(gm, wide("mm"))
    casts = sum(inserted_for(node) is not None for node in gm.graph.nodes)
    assert (casts == 0) is (dtype is torch.float64)


def test_an_op_with_several_results_gives_them_back_in_their_dtypes() -> None:
    low = {"dtype": torch.bfloat16}
    gm = backward_graph(
        lambda x, w: torch.nn.functional.layer_norm(x, (4,), w, w) * x, leaf(2, 4, **low), leaf(4, **low)
    )
    run(gm, wide("native_layer_norm_backward"))
    (node,) = [node for node in gm.graph.nodes if op_name(node) == "aten::native_layer_norm_backward.default"]
    values = [source.meta["val"] for source in gm.graph.find_nodes(op="placeholder")]
    assert {value.dtype for value in node.meta["val"]} == {torch.float32}
    assert {user.meta["val"].dtype for item in node.users for user in item.users} == {torch.bfloat16}
    real = [value for value in gm(*[torch.ones(v.shape, dtype=v.dtype) for v in values]) if value is not None]
    assert [value.dtype for value in real] == [torch.bfloat16, torch.bfloat16]
