"""Hooks on gradients of values run as under autocast: on the gradient of all uses, in the dtype of the value."""

from collections.abc import Callable

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once, exhaustive
from support.machines.lacks import needs_gradient_hooks
from support.oracles.like_autocast import assert_like_autocast, compile_with, leaf
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import fxamp


def after_uses(x: Tensor, w: Tensor) -> Tensor:
    h = linear(x, w)
    y = linear(h, w).relu() + h
    h.register_hook(lambda g: g.clamp(-0.5, 0.5))
    return y


def between_uses(x: Tensor, w: Tensor) -> Tensor:
    h = linear(x, w)
    y = linear(h, w)
    h.register_hook(lambda g: g * 3)
    return y * h


def several(x: Tensor, w: Tensor) -> Tensor:
    h = linear(x, w)
    h.register_hook(lambda g: g + 1)
    y = h.exp()
    h.register_hook(lambda g: g * 2)
    y.register_hook(lambda g: -g)
    return y


def in_checkpoint(x: Tensor, w: Tensor) -> Tensor:
    def body(a: Tensor) -> Tensor:
        h = linear(a, w)
        y = h.relu()
        h.register_hook(lambda g: g * 3)
        return y

    return checkpoint(body, x * 2, use_reentrant=False)


def in_region(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        h = linear(x, w)
        y = h.relu()
        h.register_hook(lambda g: g * 3)
    return linear(y, w)


PROGRAMS = (
    *(after_uses, between_uses, in_checkpoint, in_region),
    pytest.param(several, marks=needs_gradient_hooks),
)


@each_once("program, around, lowering", PROGRAMS, [False, True], ["eager", "aot_eager"])
def test_a_hook_sees_what_autocast_shows(program: Callable[..., Tensor], around: bool, lowering: str) -> None:
    assert_like_autocast(program, leaf(4, 8), leaf(8, 8), lowering=lowering, around=around)


@pytest.mark.inductor
@pytest.mark.parametrize("program", exhaustive([after_uses, between_uses], always=[after_uses]))
def test_a_hook_in_inductors_kernels(program: Callable[..., Tensor]) -> None:
    """The gradient is no further from autocast's than that is from float32's."""
    region = torch.autocast("cpu", torch.bfloat16)
    ours, theirs, plain = map(_gradient, (compile_with(program, "inductor"), region(program), program))
    assert (ours - theirs).norm() <= (theirs - plain).norm()


def _gradient(call: Callable[..., Tensor]) -> Tensor:
    x, w = leaf(4, 8), leaf(8, 8)
    return torch.autograd.grad(call(x, w).sum(), x)[0]


def test_rewrite_keeps_a_hook() -> None:
    x, w = leaf(4, 8), leaf(8, 8)
    gradients = []
    for call in (
        fxamp.rewrite(after_uses, (x, w), policy="cpu-bfloat16"),
        torch.autocast("cpu", torch.bfloat16)(after_uses),
    ):
        gradients.append(torch.autograd.grad(call(x, w).sum(), (x, w)))
    assert_equal(*gradients)
