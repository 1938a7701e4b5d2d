"""Gradients of what reads an input that an autograd.Function writes to, for all ways to read it."""

from collections.abc import Callable
from typing import Any

import torch
from support.checks.exhaustive import each_once
from support.oracles.like_autocast import assert_like_autocast, leaf
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOWERINGS = ["eager", "aot_eager"]


class Scaled(torch.autograd.Function):
    """Writes to its first input; the gradients are not those of the formula, so that one that is missing shows."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        a.mul_(b).add_(1)
        ctx.mark_dirty(a)
        ctx.save_for_backward(a, b)
        return a, b * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, second: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return gradient * b * 3, gradient * a + second


class Unmarked(torch.autograd.Function):
    """As :class:`Scaled`, without a mark: the input keeps its history, and only the result has the Function's."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a.mul_(b).add_(1)
        return a

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 3, gradient


def read_afterwards(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    result, _ = Scaled.apply(h, w)
    return result * 2, h.sin()


def result_dropped(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    Scaled.apply(h, w)
    return h.sin(), h @ w


def views_before_and_after(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    row = h[1]
    result, double = Scaled.apply(h, w)
    return row * 2, h.t() @ w, result, double


def in_a_checkpoint(x: Tensor, w: Tensor) -> Any:
    return (checkpoint(lambda x, w: result_dropped(x, w)[0], x, w, use_reentrant=False),)


def without_a_mark(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    return Unmarked.apply(h, w) * 2, h.sin()


@each_once(
    "program, lowering",
    [read_afterwards, result_dropped, views_before_and_after, in_a_checkpoint, without_a_mark],
    LOWERINGS,
)
def test_gradients_are_those_of_autocast(program: Callable[..., Any], lowering: str) -> None:
    assert_like_autocast(program, leaf(4, 4), leaf(4, 4), lowering=lowering)
