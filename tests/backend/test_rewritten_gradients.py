"""The gradients of what fxamp.rewrite returns are those of eager autocast, also the second ones."""

from typing import Any

import pytest
import torch
from support.oracles.like_autocast import assert_rewritten_like_autocast, leaf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.reports.list_graph import list_graph


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), inner, nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.body, x, use_reentrant=False)
        return result.sin()


@pytest.mark.parametrize("inner", [nn.Identity(), nn.BatchNorm1d(8)], ids=["dropout", "dropout and buffers"])
def test_a_checkpoint_computes_the_same_numbers_again(inner: nn.Module) -> None:
    model = Checkpointed(inner)
    assert_rewritten_like_autocast(model, leaf(4, 8), oracle=model)


@pytest.mark.parametrize("kind", ["checkpoint", "function"])
def test_a_listing_shows_the_bodies_of_a_rewritten_call(kind: str) -> None:
    model: nn.Module = Checkpointed(nn.Identity()) if kind == "checkpoint" else Cubed()
    x = torch.randn(4, 8 if kind == "checkpoint" else 4)
    entries = list_graph(fxamp.rewrite(model, (x,), policy="cpu-bfloat16")).entries
    (call,) = (entry for entry in entries if entry.target.startswith("fxamp."))
    assert call.bodies and not call.verbatim


def test_a_checkpoint_is_exported() -> None:
    model, x = Checkpointed(nn.BatchNorm1d(8)).eval(), torch.randn(4, 8)
    rewritten = fxamp.rewrite(model, (x,), policy="cpu-bfloat16")
    assert torch.equal(torch.export.export(rewritten, (x,)).module()(x), rewritten(x))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


class Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        cube: Tensor = Cube.apply(self.inner(x))
        return cube * x


def test_a_second_backward_through_a_function() -> None:
    model, x = Cubed(), leaf(3, 4)
    rewritten = fxamp.rewrite(model, (x,), policy="cpu-bfloat16")

    def gradients(call: nn.Module) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=call is model):
            result = call(x).float().sum()
        (gradient,) = torch.autograd.grad(result, x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), (x, *model.parameters()), allow_unused=True)

    got, expected = gradients(rewritten), gradients(model)
    assert [value is None for value in got] == [value is None for value in expected]
    for one, other in zip(got, expected, strict=True):
        assert one is None or torch.equal(one, other)
