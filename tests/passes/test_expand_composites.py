import torch
from bench_graph import policy, workbench

from fxamp.passes.expand_composites import ExpandComposites
from fxamp.policy import Category, Rule


def test_a_composite_that_holds_a_ruled_op_is_replaced_by_its_parts() -> None:
    bench = workbench(lambda a, b: torch.einsum("ij,jk->ik", a, b), torch.ones(2, 3), torch.ones(3, 4))
    assert bench.golden("expand-composites", ExpandComposites()).modified == 1
    assert "bmm" in bench.text


def test_a_composite_without_a_ruled_op_stays_whole() -> None:
    bench = workbench(lambda a: torch.nn.functional.dropout(a).reshape(-1), torch.ones(2, 3))
    before = bench.text
    assert bench.run(ExpandComposites()).modified == 0
    assert bench.text == before


def test_running_twice_changes_nothing_more() -> None:
    bench = workbench(lambda a, b: torch.tensordot(a, b, 1), torch.ones(2, 3), torch.ones(3, 4))
    assert bench.run(ExpandComposites()).modified == 1
    once = bench.text
    assert bench.run(ExpandComposites()).modified == 0
    assert bench.text == once


def test_a_composite_with_a_rule_of_its_own_is_left_to_it() -> None:
    einsum = policy(Rule("einsum", Category.LOWER_PRECISION_FP, ("einsum", "bmm")))
    bench = workbench(lambda a, b: torch.einsum("ij,jk->ik", a, b), torch.ones(2, 3), torch.ones(3, 4), under=einsum)
    assert bench.run(ExpandComposites()).modified == 0


def test_parts_of_parts_are_found() -> None:
    deep = policy(Rule("log", Category.FP32, ("log_softmax",)))
    bench = workbench(
        torch.nn.functional.cross_entropy, torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), under=deep
    )
    bench.run(ExpandComposites())
    assert "log_softmax" in bench.text and "cross_entropy" not in bench.text


def test_the_parts_carry_the_users_source_line() -> None:
    bench = workbench(lambda a, b: torch.einsum("ij,jk->ik", a, b), torch.ones(2, 3), torch.ones(3, 4))
    bench.run(ExpandComposites())
    calls = [node for node in bench.captured.module.graph.nodes if node.op == "call_function"]
    assert calls and all("torch.einsum" in node.meta["stack_trace"] for node in calls)


def test_a_composite_that_is_valid_only_under_autocast_is_expanded_under_it() -> None:
    def mixed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,jk->ik", a @ a, b)

    bench = workbench(mixed, torch.ones(3, 3), torch.ones(3, 4), ambient=torch.bfloat16)
    bench.run(ExpandComposites())
    assert "bmm" in bench.text
