from collections.abc import Callable

import pytest
import torch
from support.checks.bench_graph import policy, workbench

from fxamp.errors import BannedOpError
from fxamp.graph import op_name
from fxamp.passes.forward.annotate_rules import AnnotateRules
from fxamp.passes.shared.decision import Decision, decision
from fxamp.policy import Category, Rule


def decisions(bench: object) -> dict[str, Decision]:
    graph = bench.captured.module.graph  # type: ignore[attr-defined]
    return {op_name(node): choice for node in graph.nodes if (choice := decision(node)) is not None}


def test_every_op_gets_the_rule_that_matches_it_or_none() -> None:
    bench = workbench(lambda a: (a.mm(a).exp() + 1).relu(), torch.ones(2, 2))
    before = bench.text
    bench.run(AnnotateRules())
    rules = {name: choice.rule.id if choice.rule else None for name, choice in decisions(bench).items()}
    assert rules == {
        "aten::mm.default": "products",
        "aten::exp.default": "wide",
        "aten::add.Tensor": None,
        "aten::relu.default": None,
    }
    assert bench.text == before


def test_the_rules_that_lost_are_recorded() -> None:
    early, late = Rule("early", Category.FP32, ("mm",)), Rule("late", Category.LOWER_PRECISION_FP, ("mm",))
    bench = workbench(lambda a: a.mm(a), torch.ones(2, 2), under=policy(early, late))
    bench.run(AnnotateRules())
    choice = decisions(bench)["aten::mm.default"]
    assert (choice.rule, choice.lost) == (late, (early,))


def test_running_twice_changes_nothing_more() -> None:
    bench = workbench(lambda a: a.mm(a), torch.ones(2, 2))
    assert bench.run(AnnotateRules()).modified == 1
    assert bench.run(AnnotateRules()).modified == 0


def test_no_rule_holds_where_autocast_is_disabled() -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return a.mm(a)

    bench = workbench(program, torch.ones(2, 2))
    bench.run(AnnotateRules())
    choice = decisions(bench)["aten::mm.default"]
    assert choice.rule is None and choice.lower is None and "disabled" in choice.reason


def test_a_region_has_its_own_dtype() -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return a.mm(a)

    bench = workbench(program, torch.ones(2, 2))
    bench.run(AnnotateRules())
    assert decisions(bench)["aten::mm.default"].lower is torch.float16


def test_in_place_out_and_view_calls_follow_their_inputs() -> None:
    rules = policy(Rule("all", Category.LOWER_PRECISION_FP, ("exp_", "view", "mm")))
    bench = workbench(lambda a: a.clone().view(4).exp_(), torch.ones(2, 2), under=rules)
    bench.run(AnnotateRules())
    choices = decisions(bench)
    assert choices["aten::exp_.default"].rule is None and "in-place" in choices["aten::exp_.default"].reason
    assert choices["aten::view.default"].rule is None and "view" in choices["aten::view.default"].reason


def test_a_banned_op_is_refused_with_its_advice_and_the_source_line() -> None:
    banned = policy(Rule("no", Category.BANNED, ("exp",), advice="take log instead"))
    bench = workbench(lambda a: a.exp(), torch.ones(2, 2), under=banned)
    with pytest.raises(BannedOpError, match=r"(?s)take log instead.*test_annotate_rules.py:\d+: .*a\.exp\(\)"):
        bench.run(AnnotateRules())


@pytest.mark.parametrize(
    ("make", "whole"),
    [
        (lambda n: torch.arange(n)[None, :].float(), True),
        (lambda n: torch.arange(n, dtype=torch.float32).expand(1, n), True),
        (lambda n: torch.ones(1, n, dtype=torch.int32).cumsum(1).to(torch.float32), True),
        (lambda n: torch.cat([torch.arange(n)[None], torch.arange(n)[None] + n]).float(), True),
        (lambda n: (torch.arange(n)[None] < 3).long().float(), False),
        (lambda n: torch.nn.functional.one_hot(torch.arange(n), n).float(), False),
        (lambda n: torch.arange(n)[None].to(torch.uint8).float(), False),
        (lambda n: torch.arange(n)[None].float() / n, False),
    ],
    ids=["arange", "float arange", "cumsum", "cat", "mask", "one_hot", "uint8", "scaled"],
)
def test_a_product_of_whole_numbers_is_not_rounded(make: Callable[[int], torch.Tensor], whole: bool) -> None:
    """Unless the program runs it under autocast, which rounds it."""

    def program(a: torch.Tensor) -> torch.Tensor:
        return make(len(a)).matmul(a)

    rules = policy(Rule("products", Category.LOWER_PRECISION_FP, ("matmul", "mm")))
    bench = workbench(program, torch.ones(4, 2), under=rules)
    bench.run(AnnotateRules())
    choice = decisions(bench)["aten::matmul.default"]
    assert (choice.rule is None) == whole
    assert (
        "holds whole numbers, which torch.bfloat16 rounds from 257 on, so rule products does not apply" in choice.reason
    ) == whole

    def under_autocast(a: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return program(a)

    bench = workbench(under_autocast, torch.ones(4, 2), under=rules)
    bench.run(AnnotateRules())
    assert decisions(bench)["aten::matmul.default"].rule is not None
