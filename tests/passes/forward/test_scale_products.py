"""scale-products: which products go to fp8, and why the others do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.bench_graph import Workbench, policy, workbench
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxamp.graph import all_nodes, op_name
from fxamp.passes.forward.annotate_rules import AnnotateRules
from fxamp.passes.forward.insert_casts import InsertCasts
from fxamp.passes.forward.scale_products import ScaleProducts
from fxamp.passes.shared.decision import decision
from fxamp.policy import Category, Policy, Rule

PRODUCTS = ("linear", "addmm", "mm", "matmul")


def in_fp8(*others: Rule, ops: tuple[str, ...] = PRODUCTS, recipe: str = "tensorwise", **more: Any) -> Policy:
    return policy(Rule("fp8", Category.FP8, ops, recipe=recipe, **more), *others)


def bench_of(program: Callable[..., Any], *inputs: Any, under: Policy | None = None) -> Workbench:
    bench = workbench(program, *inputs, under=under or in_fp8())
    bench.run(AnnotateRules(), InsertCasts())
    return bench


def scaled(bench: Workbench) -> list[str]:
    nodes = (node for node in all_nodes(bench.captured.module))
    return [
        node.name for node in nodes if node.op == "call_function" and op_name(node) == "fxamp::scaled_linear.default"
    ]


def refusals(bench: Workbench) -> list[str]:
    decisions = [decision(node) for node in all_nodes(bench.captured.module)]
    return [one.overruled for one in decisions if one is not None and one.overruled]


X, W = torch.ones(4, 32), torch.ones(32, 16)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def test_linear_layers() -> None:
    bench = bench_of(Layers(), torch.ones(2, 3, 32), under=in_fp8(ops=("linear",)))
    assert bench.golden("scale-products", ScaleProducts()).modified == 2
    assert not refusals(bench)


def test_products_with_weights() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return x @ w + x.unsqueeze(0).matmul(w) + torch.mm(x, w) + torch.addmm(b, x, w) + F.linear(x, w.t(), b)

    bench = bench_of(program, X, W, torch.ones(16))
    assert bench.golden("scale-products-of-every-kind", ScaleProducts()).modified == 5
    (value,) = bench.captured.module(X, W, torch.ones(16))
    assert torch.equal(value, torch.full((1, 4, 16), 162.0).bfloat16())  # 5 * 32, and two biases


@pytest.mark.parametrize(
    ("program", "inputs", "why"),
    [
        (lambda x, w: x @ w.exp(), (X, W), "the second operand is not a weight: the program computes it"),
        (lambda x, w: (x @ w) @ (x @ w).t(), (X, W), "the second operand is not a weight: the program computes it"),
        (lambda x, w: x[0] @ w, (X, W), "the first operand is a vector"),
        (lambda x, w: x @ w[:, 0], (X, W), "the second operand has 1 dimensions, not 2 or 3"),
        (lambda x, w: x @ w.expand(2, 32, 16), (X, W), "it multiplies 2 matrices by a tensor of 2 dimensions"),
        (lambda x, w: x @ w[:, :8], (X, W), "size 1 of the weight is 8, not a multiple of 16"),
        (lambda x, w: x[:, :24] @ w[:24], (X, W), "size 0 of the weight is 24, not a multiple of 16"),
        (lambda x, w: x[:, :0] @ w[:0], (X, W), "size 0 of the weight is 0, not a multiple of 16"),
        (lambda x, w: x[:0] @ w, (X, W), "it has no rows"),
        (
            lambda x, w: torch.addmm(x, x, w, alpha=2),
            (torch.ones(32, 32),) * 2,
            "it scales its operands by alpha or beta",
        ),
        (lambda x, w: x.double() @ w.double(), (X, W), "its result is float64"),
        (lambda x, w: torch.mm(x, w, out_dtype=torch.float32), (X.bfloat16(), W.bfloat16()), "it names its dtype"),
    ],
)
def test_what_stays_in_16_bits(program: Callable[..., Any], inputs: tuple[Tensor, ...], why: str) -> None:
    bench = bench_of(program, *inputs)
    before = bench.text
    assert bench.run(ScaleProducts()).modified == len(scaled(bench))
    assert scaled(bench) or bench.text == before
    assert f"not in fp8: {why}" in refusals(bench)


def test_bodies_know_their_weights() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        def body(a: Tensor, b: Tensor) -> Tensor:
            return (a @ b).relu() @ (a @ b).t()

        return checkpoint(body, x, w, use_reentrant=False) + torch.cond(x.sum() > 0, body, body, (x, w))

    bench = bench_of(program, X, W.clone().requires_grad_())
    assert bench.run(ScaleProducts()).modified == 6
    assert refusals(bench).count("not in fp8: the second operand is not a weight: the program computes it") == 3


def test_regions_keep_their_dtypes() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            exact = x @ w
        with torch.autocast("cpu", torch.float16):
            half = x @ w
        return exact + half.float() + x @ w

    bench = bench_of(program, X, W)
    assert bench.run(ScaleProducts()).modified == 2
    dtypes = [n.args[4] for n in bench.captured.module.graph.nodes if op_name(n) == "fxamp::scaled_linear.default"]
    assert dtypes == [torch.float16, torch.bfloat16]


def test_a_weight_that_is_written_to_is_read_where_it_was_cast() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        before = x @ w
        w.mul_(2)
        return before + x @ w

    bench = bench_of(program, X, W)
    assert bench.run(ScaleProducts()).modified == 2
    (value, *_) = bench.captured.module(X, W.clone())
    assert torch.equal(value, torch.full((4, 16), 96.0).bfloat16())


def test_a_body_knows_what_is_written_around_it() -> None:
    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        def body(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return (a @ b.t()) @ c

        y: Tensor = checkpoint(body, x, w, v, use_reentrant=False)
        with torch.no_grad():
            w.view(-1)[:5].mul_(2)
        return y

    bench = bench_of(program, torch.ones(4, 32, requires_grad=True), torch.ones(32, 32), torch.ones(32, 32))
    assert bench.run(ScaleProducts()).modified == 1
    assert refusals(bench) == ["not in fp8: the program writes to its weight"]


def test_rules_with_conditions_decide_first() -> None:
    args = {"weight": {"shape": ["%16", ">16"]}}
    bench = bench_of(Layers(), torch.ones(2, 32), under=in_fp8(ops=("linear",), args=args))
    assert bench.run(ScaleProducts()).modified == 2
    wide = Rule("head", Category.FP32, modules=("second",))
    bench = bench_of(Layers(), torch.ones(2, 32), under=in_fp8(wide, ops=("linear",), recipe="rowwise"))
    assert bench.run(ScaleProducts()).modified == 1 and not refusals(bench)


def test_without_rules_for_fp8_nothing_is_traversed() -> None:
    bench = bench_of(Layers(), torch.ones(2, 32), under=policy())
    assert bench.run(ScaleProducts()).modified == 0 and not scaled(bench)


@pytest.mark.parametrize(("cast", "recipe"), [(Category.MXFP8, "rceil"), (Category.NVFP4, "pretraining")])
def test_blocks_need_weights_of_such_sizes(cast: Category, recipe: str) -> None:
    """16 is enough for fp8; rows need not fit, because those that a product sums over are padded."""
    rule = Rule("blocks", cast, PRODUCTS, recipe=recipe)
    bench = bench_of(Layers(), torch.ones(3, 32), under=policy(rule))
    assert ScaleProducts().run(bench.captured.module, bench.context).modified == 1
    assert scaled(bench) == ["linear"]
    assert refusals(bench) == ["not in fp8: size 0 of the weight is 16, not a multiple of 32"]


EXPERTS = ("_grouped_mm", "bmm", "baddbmm", "matmul", "transformers::grouped_mm_fallback")


def test_products_of_experts() -> None:
    def program(x: Tensor, w: Tensor, ends: Tensor, b: Tensor) -> Tensor:
        rows = F.grouped_mm(x.flatten(0, 1).bfloat16(), w.bfloat16(), offs=ends)
        return rows.view(2, 3, 32) + torch.bmm(x, w) + torch.baddbmm(b, x, w) + x @ w

    inputs = (torch.ones(2, 3, 32), torch.ones(2, 32, 32), torch.tensor([2, 6], dtype=torch.int32), torch.ones(32))
    rule = Rule("mxfp8", Category.MXFP8, EXPERTS, recipe="rceil")
    bench = bench_of(program, *inputs, under=policy(rule))
    assert bench.golden("scale-products-of-experts", ScaleProducts()).modified == 4
    assert bench.run(ScaleProducts()).modified == 0
    (value,) = bench.captured.module(*inputs)
    assert torch.equal(value, torch.full((2, 3, 32), 129.0).bfloat16())  # 4 * 32, and a bias


def test_the_op_of_transformers_is_a_product_of_experts() -> None:
    pytest.importorskip("transformers.integrations.moe")

    def program(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return torch.ops.transformers.grouped_mm_fallback(x, w, ends)

    inputs = (torch.ones(6, 32), torch.ones(2, 32, 32), torch.tensor([2, 6], dtype=torch.int32))
    bench = bench_of(program, *inputs, under=policy(Rule("mxfp8", Category.MXFP8, EXPERTS, recipe="rceil")))
    assert bench.run(ScaleProducts()).modified == 1 and not refusals(bench)
    (value,) = bench.captured.module(*inputs)
    assert torch.equal(value, torch.full((6, 32), 32.0).bfloat16())


@pytest.mark.parametrize(
    ("program", "ops", "why"),
    [
        (lambda x, w: x @ w, ("matmul",), "the policy has no rule for products of experts"),
        (lambda x, w: x[..., :16] @ w[:, :16], ("bmm", "matmul"), "size 1 of the weight is 16, not a multiple of 32"),
        (lambda x, w: torch.bmm(x, w.exp()), ("bmm",), "the second operand is not a weight: the program computes it"),
        (lambda x, w: x[:1] @ w, ("bmm", "matmul"), "it multiplies 2 matrices by a tensor of 3 dimensions"),
        (lambda x, w: torch.bmm(x[:, :0], w), ("bmm",), "it has no rows"),
        (lambda x, w: torch.baddbmm(w[:, :1], x, w, beta=2), ("baddbmm",), "it scales its operands by alpha or beta"),
    ],
)
def test_what_stays_in_16_bits_of_experts(program: Callable[..., Any], ops: tuple[str, ...], why: str) -> None:
    rule = Rule("mxfp8", Category.MXFP8, ops, recipe="rceil")
    bench = bench_of(program, torch.ones(2, 3, 32), torch.ones(2, 32, 32), under=policy(rule))
    assert bench.run(ScaleProducts()).modified == 0
    assert f"not in fp8: {why}" in refusals(bench)
