"""Autocast regions inside a compiled model, and around it."""

from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once
from support.machines.lacks import needs_setters_of_autocast
from support.oracles.like_autocast import assert_like_autocast, compile_with, leaf
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.capture.autocast_state import autocast_depth, autocast_state
from fxamp.errors import CaptureError


def product_in_float32(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return x @ w


@pytest.mark.parametrize("lowering", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_the_backward_of_a_disabled_region_runs_in_float32(lowering: str) -> None:
    """pytorch #153044 and #179804: torch's compiled backward runs these matrix products in bfloat16."""
    x, w = leaf(16, 16), leaf(16, 16)
    compiled = compile_with(product_in_float32, lowering, policy="auto")
    with torch.autocast("cpu", torch.bfloat16):
        loss = compiled(x, w).square().sum()
    loss.backward()
    product = (x @ w).detach()
    torch.testing.assert_close(x.grad, 2 * product @ w.detach().t())
    torch.testing.assert_close(w.grad, 2 * x.detach().t() @ product)


@each_once(
    "forward_inside, lowering",
    [True, False],
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)],
)
def test_a_backward_inside_autocast_is_not_cast_again(lowering: str, forward_inside: bool) -> None:
    x, w = leaf(16, 16), leaf(16, 16)
    compiled = compile_with(product_in_float32, lowering)
    with torch.autocast("cpu", torch.bfloat16, enabled=forward_inside):
        loss = compiled(x, w).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    product = (x @ w).detach()
    torch.testing.assert_close(x.grad, 2 * product @ w.detach().t())


def test_an_ambient_autocast_chooses_the_policy() -> None:
    compiled = compile_with(lambda x: x @ x, "eager", policy="auto")
    x = torch.ones(2, 2)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert compiled(x).dtype is dtype
    graphs = fxamp.report(compiled).graphs
    assert [graph.policy for graph in graphs] == ["cpu-bfloat16", "cpu-float16"]
    assert "autocast" in graphs[0].chosen


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_a_program_that_is_valid_only_under_autocast(lowering: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        hidden = x @ w
        return F.linear(hidden, w) + torch.einsum("ij,jk->ik", hidden, w)

    assert_like_autocast(program, leaf(4, 4), leaf(4, 4), lowering=lowering, around=True)


def test_nothing_is_cast_twice_under_an_ambient_autocast() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return x @ x

    compiled = compile_with(program, "eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(torch.ones(2, 2)).dtype is torch.float32
        assert torch.is_autocast_enabled("cpu")


def test_a_constant_in_a_16_bit_mask_is_in_range_under_an_ambient_autocast() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).masked_fill(x > 0, torch.finfo(x.dtype).min)

    compiled = compile_with(program, "eager", policy="auto")
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(compiled(torch.ones(2, 2)), torch.full((2, 2), -65504.0, dtype=torch.float16))


def test_a_region_with_another_dtype_inside_uses_no_stale_cast() -> None:
    """Eager autocast's cache hands the float16 cast of a weight to the bfloat16 region; here each dtype has its own."""

    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.float16):
            half = x @ w
        return half, x @ w

    graph = fxamp.rewrite(program, (leaf(2, 2), leaf(2, 2)), policy="cpu-bfloat16")
    half, brain = graph(leaf(2, 2), leaf(2, 2))
    assert (half.dtype, brain.dtype) == (torch.float16, torch.bfloat16)


@each_once("lowering, around", ["eager", "aot_eager"], [False, True])
def test_in_a_region_without_cache_each_use_of_a_weight_has_its_cast(lowering: str, around: bool) -> None:
    """The gradients of the uses meet in float32; so they do in a region inside that does not ask for a cache."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = x @ w
            with torch.autocast("cpu", torch.bfloat16):
                return (y.float() + x) @ w + (y.float() * 1.7) @ w

    assert_like_autocast(program, leaf(16, 16), leaf(16, 16), lowering=lowering, around=around)


@pytest.mark.parametrize("policy", ["auto", "cpu-bfloat16"])
@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("cached", [True, False])
def test_an_autocast_around_the_call_decides_whether_a_weight_is_cast_once(
    cached: bool, lowering: str, policy: str
) -> None:
    """Lightning's autocast has no cache: the gradients of two uses meet in float32."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, w).tanh(), w)

    gradients = []
    for call in (compile_with(program, lowering, policy=policy), program):
        w = leaf(16, 16)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            result = call(leaf(16, 16), w)
        gradients.append(torch.autograd.grad(result.float().square().sum(), w)[0])
    assert torch.equal(*gradients)


def switched_off(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    before = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    exact = x @ w
    torch.set_autocast_enabled("cpu", before)
    return exact, x @ w


def another_dtype(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    torch.set_autocast_dtype("cpu", torch.float16)
    half = x @ w
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    return half, x @ w


def by_keywords(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    torch.set_autocast_enabled(enabled=False, device_type="cpu")
    exact = x @ w
    torch.set_autocast_enabled("cpu", enabled=True)
    torch.set_autocast_dtype(dtype=torch.float16, device_type="cpu")
    half = x @ w
    torch.set_autocast_dtype("cpu", dtype=torch.bfloat16)
    return exact, half, x @ w


def inside_regions(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast("cpu", torch.float16):
        first = x @ w
        torch.set_autocast_enabled("cpu", False)
        second = x @ w
        with torch.autocast("cpu", torch.bfloat16):
            third = x @ w
            torch.set_autocast_dtype("cpu", torch.float16)
            fourth = x @ w
        fifth = x @ w
    return first, second, third, fourth, fifth, x @ w


def left_to_the_next_graph(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    first = x @ w
    torch.set_autocast_enabled("cpu", False)
    second = x @ w
    torch._dynamo.graph_break()
    third = x @ w
    torch.set_autocast_enabled("cpu", True)
    return first, second, third, x @ w


def switched_on(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_enabled("cpu", True)
    half = x @ w
    torch.set_autocast_enabled("cpu", False)
    return half, x @ w


SETTERS = [
    *(switched_off, another_dtype, by_keywords, left_to_the_next_graph, switched_on),
    pytest.param(inside_regions, marks=needs_setters_of_autocast),
]


@each_once("program, lowering", SETTERS, ["eager", "aot_eager"])
def test_a_program_may_set_autocast_s_state(program: Any, lowering: str) -> None:
    """AOTAutograd alone refuses such a graph, or reads the state when it traces."""
    results = []
    for run in (program, compile_with(program, lowering, policy="auto")):
        x, w = leaf(4, 8), leaf(8, 8)
        with autocast_state("cpu", program is not switched_on, torch.bfloat16):  # what a program leaves is restored
            values = run(x, w)
        sum(value.double().square().sum() for value in values).backward()
        results.append([*values, x.grad, w.grad])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


@needs_setters_of_autocast
def test_a_graph_that_leaves_autocast_s_state_changed_cannot_be_rewritten() -> None:
    kept = fxamp.rewrite(switched_off, (torch.ones(4, 8), torch.ones(8, 8)), policy="cpu-bfloat16")
    assert [value.dtype for value in kept(torch.ones(4, 8), torch.ones(8, 8))] == [torch.float32, torch.bfloat16]

    def program(x: Tensor) -> Tensor:
        torch.set_autocast_dtype("cpu", torch.float16)
        return x @ x

    with pytest.raises(CaptureError, match=r"autocast.* state changed"):  # some versions of torch.export say it first
        fxamp.rewrite(program, (torch.ones(4, 4),), policy="cpu-bfloat16")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.set_autocast_dtype, ("cpu", torch.float16))
    graph.output((graph.call_function(torch.mm, (x, x)),))
    with pytest.raises(CaptureError, match=r"is set to \('cpu', torch.float16\) and not set back.*autocast"):
        fxamp.rewrite(torch.fx.GraphModule({}, graph), (torch.ones(4, 4),), policy="cpu-bfloat16")


@pytest.mark.parametrize("policy", ["auto", "cpu-bfloat16"])
@pytest.mark.parametrize("ambient", [False, True])
def test_an_error_in_a_region_leaves_no_region_open(ambient: bool, policy: str) -> None:
    """Else gradients would stay off, and eager autocast would read stale weights, as after torch's own "eager"."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            torch.ops.aten._assert_async.msg((x @ w).sum() > 1e9, "the sum is small")
        return x @ w

    compiled = compile_with(program, "eager", policy=policy)
    with torch.autocast("cpu", torch.bfloat16, enabled=ambient), pytest.raises(RuntimeError, match="the sum is small"):
        compiled(leaf(2, 2), leaf(2, 2))
    assert torch.is_grad_enabled()
    assert autocast_depth() == 0


class _Fails(torch.autograd.Function):
    """Its backward raises in a region."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            torch.ops.aten._assert_async.msg((x @ x).sum() > 1e9, "the sum is small")
        return gradient * 2


def test_an_error_in_a_region_of_a_backward_leaves_no_region_open() -> None:
    result = compile_with(_Fails.apply, "eager", policy="auto")(leaf(2, 2))
    with pytest.raises(RuntimeError, match="the sum is small"):
        result.sum().backward()
    assert autocast_depth() == 0


def test_a_recomputation_that_ends_early_leaves_no_region_open() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return (x @ w).sin() * 2

    compiled = compile_with(lambda x, w: checkpoint(body, x, w, use_reentrant=False), "eager", policy="auto")
    compiled(leaf(2, 2), leaf(2, 2)).sum().backward()
    assert autocast_depth() == 0
