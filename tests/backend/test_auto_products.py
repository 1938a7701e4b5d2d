"""On a CPU that computes in bfloat16, "auto" takes it for graphs whose products are large enough, by their count."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.backend.auto_products import FLOPS_PER_CALL, FLOPS_PER_ELEMENT, Products, products
from fxamp.backend.options import parse_options
from fxamp.backend.policy_choice import choose_policy
from fxamp.capture import capture
from fxamp.capture.dynamo_trace import trace
from fxamp.passes.base import CastContext
from fxamp.pipeline import cast_graph
from fxamp.policy import Policy

SMALL, LARGE = 16, 512


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})


def counted(program: Callable[..., object], *shapes: tuple[int, ...]) -> Products:
    """The products of a program of inputs of these shapes, under cpu-bfloat16."""
    traced = trace(program, [torch.empty(shape, device="meta", dtype=torch.float32) for shape in shapes])
    policy = Policy.load("cpu-bfloat16").resolve(None)
    captured = capture(traced.module, traced.inputs)
    return products(cast_graph(captured, CastContext(captured.mode, policy, every_device=True)))


def by_hand(*calls: tuple[int, int]) -> Products:
    """``calls``: multiplications and elements of each product."""
    return Products(len(calls), sum(2 * flops for flops, _ in calls), sum(elements for _, elements in calls))


def test_products_are_what_pen_and_paper_say() -> None:
    m, k, n = 6, 10, 14
    product = m * k * n, m * k + k * n + m * n
    assert counted(lambda a, b: a @ b + 1, (m, k), (k, n)) == by_hand(product)
    assert counted(lambda *operands: F.linear(*operands), (m, k), (n, k), (n,)) == by_hand((product[0], product[1] + n))
    assert counted(lambda a, b: torch.einsum("mk,kn->mn", a, b), (m, k), (k, n)) == by_hand(product)
    batched = 3 * product[0], 3 * product[1]
    assert counted(lambda a, b: torch.matmul(a, b), (3, m, k), (3, k, n)) == by_hand(batched)
    image, kernel, result = 2 * 4 * 8 * 8, 6 * 4 * 3 * 3, 2 * 6 * 6 * 6
    convolution = result * 4 * 3 * 3, image + kernel + result
    assert counted(lambda x, w: F.conv2d(x, w), (2, 4, 8, 8), (6, 4, 3, 3)) == by_hand(convolution)
    assert counted(lambda x: x.exp().sum(), (8, 8)) == Products()


def test_attention_on_a_cpu_is_two_products_of_one_call() -> None:
    shape = batch, heads, length, width = 2, 3, 8, 4
    policy = Policy.load("cpu-bfloat16").resolve("cpu")
    traced = trace(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), [torch.ones(shape)] * 3)
    captured = capture(traced.module, traced.inputs)
    cast = cast_graph(captured, CastContext(captured.mode, policy))
    flops = 2 * batch * heads * length * length * width
    assert products(cast) == by_hand((flops, 4 * batch * heads * length * width))


def test_bfloat16_pays_where_flops_outweigh_elements_and_calls() -> None:
    cost = 2 * FLOPS_PER_CALL + 100 * FLOPS_PER_ELEMENT
    assert Products(2, cost + 1, 100).pay and not Products(2, cost, 100).pay
    assert not Products().pay


class Net(nn.Module):
    """A product, which may be in a checkpoint, and a norm."""

    def __init__(self, width: int, inside: bool = False) -> None:
        super().__init__()
        self.layer, self.norm, self.inside = nn.Linear(width, width), nn.LayerNorm(width), inside

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(self.layer, x, use_reentrant=False) if self.inside else self.layer(x)
        return self.norm(hidden)


def compiled(model: nn.Module, **options: object) -> nn.Module:
    model.compile(backend="fxamp", options={"lowering": "aot_eager", **options})
    return model


def taken(model: nn.Module) -> list[str]:
    return [graph.policy for graph in fxamp.report(model).graphs]


@pytest.mark.parametrize("inside", [False, True])
def test_small_products_stay_in_float32_bit_for_bit(inside: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The oracle is the same model uncompiled."""
    eager = Net(SMALL, inside)
    model = compiled(copy.deepcopy(eager))
    for _ in range(2):
        torch._dynamo.reset()
        x = torch.randn(4, SMALL)
        for net in (eager, model):
            net.zero_grad()
            net(x).square().sum().backward()
        assert torch.equal(model(x), eager(x))
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    assert "float32" in taken(model)
    assert "but only 0.00205 MFLOP in 1 products (bfloat16 pays from 8.02)" in str(fxamp.report(model))
    assert sum("too small" in message for message in caplog.messages) == 1


def test_large_products_run_in_bfloat16_for_a_reported_reason() -> None:
    model = compiled(Net(LARGE, inside=True))
    model(torch.randn(64, LARGE))
    assert taken(model) == ["cpu-bfloat16"]
    assert "natively; 33.6 MFLOP in 1 products (bfloat16 pays from 21.1)" in str(fxamp.report(model))


def test_training_and_evaluation_take_the_same() -> None:
    model = compiled(Net(LARGE))
    model(torch.randn(64, LARGE))
    with torch.no_grad():
        model.eval()(torch.randn(64, LARGE))
    assert taken(model) == ["cpu-bfloat16"] * 2


def test_each_graph_decides_by_its_own_products() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Net(LARGE), nn.Linear(LARGE, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            torch._dynamo.graph_break()
            result: Tensor = self.second(hidden)
            return result

    model = compiled(Broken())
    model(torch.randn(64, LARGE)).sum().backward()
    assert taken(model) == ["cpu-bfloat16", "float32"]
    assert model.first.layer.weight.grad is not None


def test_a_graph_without_products_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    step = torch.compile(lambda x: x.exp(), backend="fxamp", options={"lowering": "aot_eager"})
    step(torch.ones(4))
    assert taken(step) == ["float32"] and "but the graph has no products" in str(fxamp.report(step))
    assert not any("float32" in message for message in caplog.messages)


def test_dynamic_sizes_count_as_they_are_at_first_and_are_not_guarded_on() -> None:
    model = Net(LARGE)
    step = torch.compile(model, backend="fxamp", options={"lowering": "aot_eager"}, dynamic=True)
    for rows in (64, 65, 2):
        step(torch.randn(rows, LARGE))
    assert taken(step) == ["cpu-bfloat16"]
    assert "33.6 MFLOP in 1 products for the first sizes (bfloat16 pays" in str(fxamp.report(step))


def test_a_new_compilation_decides_by_the_same_rule() -> None:
    step = torch.compile(Net(LARGE), backend="fxamp", options={"lowering": "aot_eager"}, dynamic=False)
    for rows in (64, 2, 64):
        step(torch.randn(rows, LARGE))
    assert taken(step) == ["cpu-bfloat16", "float32"]


def test_what_asks_for_a_dtype_is_not_overruled() -> None:
    named = compiled(Net(SMALL), policy="cpu-bfloat16")
    named(torch.ones(2, SMALL))
    under = compiled(Net(SMALL))
    with torch.autocast("cpu", torch.bfloat16):
        under(torch.ones(2, SMALL))
    assert taken(named) == taken(under) == ["cpu-bfloat16"]
    scaled = parse_options({"scaler": fxamp.GradScaler("cpu")})
    assert not choose_policy(scaled, [torch.ones(2)]).if_it_pays


def test_rewrite_decides_alike() -> None:
    def dtypes(width: int) -> set[torch.dtype]:
        graph = fxamp.rewrite(Net(width), (torch.randn(64, width),)).graph
        return {node.meta["val"].dtype for node in graph.nodes if "linear" in str(node.target)}

    assert (dtypes(SMALL), dtypes(LARGE)) == ({torch.float32}, {torch.bfloat16})
