"""Rules with conditions on the module, the arguments and the sizes of a call, on captured graphs."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.checks.bench_graph import policy, workbench
from torch import nn

from fxamp import Policy
from fxamp.errors import PolicyError
from fxamp.graph import op_name
from fxamp.passes.forward.annotate_rules import AnnotateRules
from fxamp.passes.forward.expand_composites import ExpandComposites
from fxamp.passes.forward.insert_casts import InsertCasts
from fxamp.passes.shared.decision import Decision, decision
from fxamp.policy import Category, Rule

LOW, FP32 = Category.LOWER_PRECISION_FP, Category.FP32
X = torch.ones(2, 4)


def decided(
    program: Callable[..., Any], *inputs: Any, under: Policy, expand: bool = False
) -> list[tuple[str, Decision]]:
    """``(op, decision)`` of every op, in order."""
    bench = workbench(program, *inputs, under=under)
    bench.run(*([ExpandComposites()] if expand else []), AnnotateRules())
    graph = bench.captured.module.graph
    return [(op_name(node), choice) for node in graph.nodes if (choice := decision(node)) is not None]


def ids(program: Callable[..., Any], *inputs: Any, under: Policy, expand: bool = False) -> list[str]:
    """The rule's id for every op, ``"-"`` where none decides."""
    return [
        choice.rule.id if choice.rule else "-" for _, choice in decided(program, *inputs, under=under, expand=expand)
    ]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.body = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.router(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


PRODUCTS = Rule("products", LOW, ("linear", "mm", "bmm"))


@pytest.mark.parametrize(
    ("condition", "linears"),
    [
        ({"modules": ("layers.*.router",)}, "pspsp"),
        ({"modules": ("router",)}, "pspsp"),
        ({"modules": (".router",)}, "ppppp"),
        ({"modules": ("lm_head", "layers.1")}, "ppsss"),
        ({"modules": ("*",)}, "sssss"),
        ({"module_classes": ("Block",)}, "ssssp"),
        ({"module_classes": ("torch.nn.modules.*",)}, "sssss"),
        ({"module_classes": ("*Norm",)}, "ppppp"),
        ({"modules": ("layers.0",), "module_classes": ("Block",)}, "ssppp"),
        ({"args": {"weight": {"shape": [3, "*"]}}}, "pppps"),
        ({"args": {"weight": {"size": ">=16"}}}, "ssssp"),
        ({"args": {"weight": {"dtype": "float32", "rank": 2}}}, "sssss"),
        ({"args": {"weight": {"dtype": ["float16", "bfloat16"]}}}, "ppppp"),
        ({"args": {"bias": {"rank": 2}}}, "ppppp"),
    ],
)
def test_a_condition_picks_the_calls_that_meet_it(condition: dict[str, Any], linears: str) -> None:
    special = Rule("special", FP32, ("linear",), **condition)
    choices = [
        choice for op, choice in decided(Net(), X, under=policy(PRODUCTS, special)) if op == "aten::linear.default"
    ]
    assert "".join(choice.rule.id[0] for choice in choices if choice.rule) == linears
    assert [choice.lost for choice in choices] == [(PRODUCTS,) if letter == "s" else () for letter in linears]


def test_a_rule_without_ops_covers_what_computes() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.view(4, 2).exp().to(torch.float64).clone()
        return torch.softmax(y, -1, dtype=torch.float32).sum()

    every = policy(Rule("all", LOW, args={"self": {"rank": "<3"}}))
    assert {op: choice.rule is not None for op, choice in decided(program, X, under=every)} == {
        "aten::view.default": False,
        "aten::exp.default": True,
        "aten::to.dtype": False,
        "aten::clone.default": False,
        "aten::softmax.int": False,
        "aten::sum.default": True,
    }


@pytest.mark.parametrize(
    ("call", "elements"),
    [
        (lambda x: x.sum(), 24),
        (lambda x: x.sum(1), 3),
        (lambda x: x.sum((0, -1)), 8),
        (lambda x: x.mean([]), 24),
        (lambda x: x.softmax(-1), 4),
        (lambda x: torch.nn.functional.layer_norm(x, (3, 4)), 12),
        (lambda x: torch.linalg.vector_norm(x), 24),
        (lambda x: torch.cat((x, x), -1), None),
        (lambda x: x.exp(), None),
    ],
)
def test_reduces_counts_the_elements_of_one_result(call: Callable[..., Any], elements: int | None) -> None:
    x = torch.ones(2, 3, 4)
    for condition, met in ((f"=={elements}", True), (f">{elements}", False)) if elements else ((">=0", False),):
        assert ids(call, x, under=policy(Rule("r", FP32, reduces=condition)))[-1] == ("r" if met else "-")


def test_values_are_compared_with_the_schemas_defaults_filled_in() -> None:
    last = policy(Rule("last", FP32, ("sum", "softmax"), args={"dim": -1}), Rule("keep", FP32, args={"keepdim": True}))
    assert ids(lambda x: x.sum(-1), X, under=last) == ["last"]
    assert ids(lambda x: x.sum((-1,), True), X, under=last) == ["keep"]
    assert ids(lambda x: x.softmax(0), X, under=last) == ["-"]
    assert ids(lambda x: x.sum(), X, under=policy(Rule("default", FP32, args={"keepdim": False}))) == ["-"]
    assert ids(lambda x: x.sum(0), X, under=policy(Rule("default", FP32, args={"keepdim": False}))) == ["default"]
    exact = policy(Rule("erf", FP32, ("gelu",), args={"approximate": "none"}))
    assert ids(lambda x: torch.nn.functional.gelu(x), X, under=exact) == ["erf"]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("n", LOW, ("layer_norm",), inputs={"wieght": "fp32"}), "inputs names 'wieght', .*did you mean 'weight'"),
        (Rule("n", LOW, ("sum", "exp"), args={"input": 1}), "aten::sum and aten::exp have no such argument; .*self"),
        (Rule("n", LOW, ("sum.default",), args={"dim": 1}), "args names 'dim', but aten::sum.default has no such"),
        (Rule("n", LOW, ("mm",), region="backward", inputs={"other": "fp32"}), "accepted: mat2, .*self"),
        (Rule("n", LOW, ("sum", "exp"), args={"dim": 1}), None),
        (Rule("n", LOW, ("sum", "nowhere::op"), args={"input": 1}), None),
        (Rule("n", LOW, ("s*",), args={"input": 1}), None),
        (Rule("n", LOW, args={"input": 1}), None),
    ],
)
def test_an_argument_that_no_op_of_the_rule_has_is_refused(rule: Rule, message: str | None) -> None:
    with pytest.raises(PolicyError, match=rf"rule 'n': .*{message}") if message else nullcontext():
        ids(lambda x: x.sum(), X, under=policy(rule))


def test_a_list_of_tensors_meets_a_condition_if_one_of_them_does() -> None:
    wide = policy(Rule("wide", FP32, ("cat",), args={"tensors": {"size": ">8"}}))
    assert ids(lambda a, b: torch.cat((a, b)), X, torch.ones(3, 4), under=wide) == ["wide"]
    assert ids(lambda a, b: torch.cat((a, b)), X, X, under=wide) == ["-"]


def test_a_condition_inside_a_composite_expands_it_there_alone() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Product(), Product()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x)

    class Product(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("ij,kj->ik", x, x)

    ops = [op for op, _ in decided(Two(), X, under=policy(Rule("b", LOW, ("bmm",), modules=("b",))), expand=True)]
    assert ops.count("aten::einsum.default") == 1 and ops.count("aten::bmm.default") == 1


@pytest.mark.parametrize(
    ("unlisted", "dtype"),
    [
        ("follow", torch.bfloat16),
        ("fp32", torch.float32),
        ("lower_precision_fp", torch.bfloat16),
        ("promote", torch.float32),
    ],
)
def test_unlisted_decides_what_no_rule_covers(unlisted: str, dtype: torch.dtype) -> None:
    under = Policy("test", "cpu", "bfloat16", rules=(PRODUCTS,), unlisted=unlisted)
    bench = workbench(lambda x, w: (x.mm(w).view(8) * x.view(8)).relu(), X, torch.ones(4, 4), under=under)
    bench.run(AnnotateRules(), InsertCasts())
    choices = {op_name(n): (decision(n), n.meta["val"].dtype) for n in bench.captured.module.graph.nodes if decision(n)}
    expected = torch.float32 if unlisted == "follow" else dtype  # torch promotes bfloat16 times float32 by itself
    assert choices["aten::mul.Tensor"][1] is expected and choices["aten::relu.default"][1] is expected
    assert choices["aten::view.default"][0].rule is None
    rule = choices["aten::relu.default"][0].rule
    assert rule is None if unlisted == "follow" else rule is not None and (rule.id, rule.cast) == ("unlisted", unlisted)


def test_inputs_have_dtypes_of_their_own() -> None:
    norm = Rule("norm", LOW, ("layer_norm",), inputs={"weight": "fp32", "bias": "follow"})
    bench = workbench(nn.LayerNorm(4), X, under=policy(norm))
    bench.run(AnnotateRules(), InsertCasts())
    (node,) = [n for n in bench.captured.module.graph.nodes if op_name(n) == "aten::layer_norm.default"]
    values = [source.meta["val"].dtype for source in node.all_input_nodes]
    assert values == [torch.bfloat16, torch.float32, torch.float32] and node.meta["val"].dtype is torch.bfloat16


def test_a_mixture_that_the_op_refuses_falls_back() -> None:
    mixed = Rule("mixed", LOW, ("linear",), inputs={"weight": "fp32"})
    bench = workbench(nn.Linear(4, 4), X, under=policy(mixed))
    bench.run(AnnotateRules(), InsertCasts())
    (node,) = [n for n in bench.captured.module.graph.nodes if op_name(n) == "aten::linear.default"]
    assert node.meta["val"].dtype is torch.float32 and "must have one dtype" in decision(node).overruled


def test_a_symbolic_size_meets_no_condition_for_a_stated_reason() -> None:

    from fxamp.capture import capture
    from fxamp.passes.base import CastContext

    graphs: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        captured = capture(gm, inputs)
        under = policy(Rule("big", FP32, ("exp",), args={"self": {"size": ">1"}}), PRODUCTS)
        AnnotateRules().run(captured.module, CastContext(captured.mode, under))
        graphs.append(captured.module.graph)
        return gm.forward

    torch.compile(lambda x: x.exp(), backend=backend, dynamic=True)(torch.ones(3, 5))
    (choice,) = [choice for node in graphs[0].nodes if (choice := decision(node)) is not None]
    assert choice.rule is None
    assert "no rule: follows its inputs; rule big does not apply: the size of self is not known (s" in choice.reason
