"""Gradients go where they go under eager autocast, whatever the program makes under ``no_grad`` and ``enable_grad``."""

from collections.abc import Callable

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once
from support.oracles.like_autocast import compile_with, leaf
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Results = tuple[Tensor, ...]


def view_without_gradients(x: Tensor, w: Tensor) -> Results:
    h = F.linear(x, w)
    with torch.no_grad():
        v = h[:, :-1]
    return h, v, v * 2


def broken_without_gradients(x: Tensor, w: Tensor) -> Results:
    h = F.linear(x, w)
    with torch.no_grad():
        v = h[1:]
        torch._dynamo.graph_break()
        u = v * 2
    return h * 1, u, v * 3


@torch.no_grad()
def product_with_gradients(x: Tensor, w: Tensor) -> Results:
    h = F.linear(x, w)
    with torch.enable_grad():
        v = F.linear(x, w)
    return h, v


@torch.no_grad()
def broken_with_gradients(x: Tensor, w: Tensor) -> Results:
    h = F.linear(x, w)
    with torch.enable_grad():
        v = F.linear(x, w)
        torch._dynamo.graph_break()
        u = v * 2
    return h * 1, u, v


def converted_without_gradients(x: Tensor, w: Tensor) -> Results:
    """Nothing is converted, so that what the conversions return needs a gradient; each product casts it for itself."""
    with torch.no_grad():
        v = x.to(x).float()
    h = v.tanh()
    return (F.linear(h, w) + F.linear(h, w.tanh()),)


def returned_without_gradients(x: Tensor, w: Tensor) -> Results:
    with torch.no_grad():
        v, _ = checkpoint(lambda a: (a, a * 2), x, use_reentrant=False)
    h = v.tanh()
    return (F.linear(h, w) + F.linear(h, w.tanh()),)


PROGRAMS = (
    converted_without_gradients,
    returned_without_gradients,
    view_without_gradients,
    broken_without_gradients,
    product_with_gradients,
    broken_with_gradients,
)


@each_once("program, lowering", PROGRAMS, ["eager", "aot_eager"])
def test_each_result_has_autocasts_gradients(program: Callable[..., Results], lowering: str) -> None:
    """None and zeros are the same here: a compiled graph has zeros for what a result does not depend on."""
    compared(program, lowering)


def compared(program: Callable[..., Results], lowering: str) -> list[tuple[Tensor, Tensor]]:
    """Each result, ours and eager autocast's, whose gradients are the same."""
    x, w = leaf(6, 8), leaf(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = program(x, w)
    pairs = list(zip(compile_with(program, lowering)(x, w), expected, strict=True))
    for ours, theirs in pairs:
        assert_equal(_gradients(ours, x, w), _gradients(theirs, x, w))
    return pairs


def _gradients(result: Tensor, *leaves: Tensor) -> list[Tensor]:
    if not result.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    total = result.float().square().sum()
    gradients = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]


def transposed(h: Tensor) -> Tensor:
    return h.t_()


def unsqueezed(h: Tensor) -> Tensor:
    h.unsqueeze_(0)
    h.squeeze_(0)
    return h.transpose_(0, 1)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x + 1

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3 + gradients[1]


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("change", [transposed, unsqueezed])
def test_a_result_of_a_function_may_change_its_shape_in_place(
    change: Callable[[Tensor], Tensor], lowering: str
) -> None:
    """What reads it afterwards runs in the policy's dtype: it has the shape that it had there, not that of the end."""

    def program(x: Tensor, w: Tensor) -> Results:
        first, second = Tripled.apply(x)  # type: ignore[no-untyped-call]
        return F.linear(first, w), F.linear(change(second), w[:, :6])

    assert all(torch.equal(ours, theirs.float()) for ours, theirs in compared(program, lowering))


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_a_result_that_changes_its_shape_has_the_dtype_of_the_region_that_it_comes_from(lowering: str) -> None:
    def program(x: Tensor, w: Tensor) -> Results:
        def body(h: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return F.linear(h, w)

        h = checkpoint(body, x, use_reentrant=False).t_()
        return h, torch.ones_like(h).sin()

    for ours, theirs in compared(program, lowering):
        assert ours.dtype is theirs.dtype is torch.bfloat16 and torch.equal(ours, theirs)


def test_a_checkpoint_whose_sizes_depend_on_values_may_return_what_a_conversion_returns_too() -> None:
    def program(x: Tensor, w: Tensor) -> Results:
        def body(h: Tensor) -> Tensor:
            rows = h.repeat_interleave(torch.tensor([1, 2])[torch.arange(6) % 2], 0).sum(0)
            return h * rows

        h = checkpoint(body, x, use_reentrant=False)
        return (F.linear(h.float(), w),)

    x, w = leaf(6, 8), leaf(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        (expected,) = program(x, w)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (ours,) = compile_with(program, "aot_eager")(x, w)
    assert torch.equal(ours, expected.float())
