"""Hooks on gradients of values run as under autocast: on the gradient of all uses, in the dtype of the value."""

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from support.machines.lacks import needs_gradient_hooks
from support.oracles.like_autocast import assert_like_autocast, compile_with, leaf
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import fxamp


def before_uses(x: Tensor, w: Tensor) -> Tensor:
    h = linear(x, w)
    h.register_hook(lambda g: g.clamp(-0.5, 0.5))
    return linear(h, w).relu() + h


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


def reading(x: Tensor, w: Tensor) -> Tensor:
    h = linear(x, w)
    y = linear(h, w)
    h.register_hook(lambda g: (g * y.detach()).masked_fill(x > 0, 0).to(g))
    return y * h


def silent(x: Tensor, w: Tensor) -> Tensor:
    h = linear(x, w)
    h.register_hook(lambda g: None)
    return h.relu()


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


def on_view(x: Tensor, w: Tensor) -> Tensor:
    h = linear(x, w)
    part = h[1:]
    part.register_hook(lambda g: g * 3)
    return part.relu().sum() + h.sum()


PROGRAMS = (
    *(before_uses, after_uses, between_uses, silent, in_checkpoint, in_region, on_view),
    *(pytest.param(program, marks=needs_gradient_hooks) for program in (several, reading)),
)


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_hook_sees_what_autocast_shows(program: Callable[..., Tensor], around: bool, lowering: str) -> None:
    assert_like_autocast(program, leaf(4, 8), leaf(8, 8), lowering=lowering, around=around)


@pytest.mark.inductor
@pytest.mark.parametrize("program", [after_uses, between_uses])
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
    assert all(map(torch.equal, *gradients))


@needs_gradient_hooks
def test_a_hook_on_a_cast_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the hook on a cast of the value, uses before would not see it."""
    for module in (
        "capture.aten_trace",
        "capture",
        "passes.forward.insert_casts",
        "passes.forward.annotate_rules",
        "graph.aliases",
    ):
        monkeypatch.setattr(import_module(f"fxamp.{module}"), "gradient_hook", lambda node: None)
    monkeypatch.setattr(import_module("fxamp.capture"), "inner_graphs", lambda node: [])
    with pytest.raises((AssertionError, RuntimeError)):
        assert_like_autocast(after_uses, leaf(4, 8), leaf(8, 8), lowering="aot_eager")
