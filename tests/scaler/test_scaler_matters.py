"""Why the backward is scaled: what underflows without it trains with it, and an overflow never reaches a parameter."""

import random

import pytest
import torch
from support.checks.exhaustive import exhaustive
from support.oracles.scaled_runs import compile_scaled, make_scaler
from support.oracles.side_by_side import assert_same, snapshot
from support.programs.small_models import Perceptron
from torch import Tensor, nn

import fxamp

STEPS = 20
SMALLEST = 2.0**-24
"""float16's smallest subnormal: what is below half of it becomes zero."""


def train(own: fxamp.GradScaler, factor: float, way: str) -> tuple[list[float], nn.Module, list[bool]]:
    """Train in float16, compiled or eager, on a loss times ``factor``, which the learning rate makes good."""
    net = Perceptron(4, 8, 1)
    model = compile_scaled(net, own, "aot_eager") if way == "compiled" else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 / factor)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    losses, skips = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=way == "eager"):
            output = model(x)
        loss = (output.float() - y).square().mean() * factor
        own.scale(loss).backward()
        skips.append(own.step(optimizer, return_skipped=True).skipped)
        own.update()
        losses.append(loss.item() / factor)
    return losses, net, skips


@pytest.mark.parametrize("way", ["compiled", "eager"])
def test_gradients_that_underflow_train_only_when_scaled(way: str) -> None:
    factor = SMALLEST / 8
    losses, net, _ = train(make_scaler(enabled=False), factor, way)
    # A graph sums the gradient of the last bias in float32, past every float16 product.
    exempt = "last.bias" if way == "compiled" else "none"
    start = dict(Perceptron(4, 8, 1).named_parameters())
    assert all(torch.equal(p, start[name]) for name, p in net.named_parameters() if exempt not in name)
    assert way == "compiled" or losses == losses[:1] * STEPS
    losses, _, skips = train(make_scaler(2.0**16), factor, way)
    assert losses[-1] < losses[0] / 2
    assert not any(skips)


@pytest.mark.parametrize("way", ["compiled", "eager"])
def test_a_scale_that_overflows_backs_off_until_training_goes_on(way: str) -> None:
    own = make_scaler(2.0**16)
    losses, net, skips = train(own, 1.0, way)
    overflows = sum(skips)
    assert 0 < overflows < STEPS / 2
    assert skips == [True] * overflows + [False] * (STEPS - overflows)
    assert losses[: overflows + 1] == losses[:1] * (overflows + 1)
    assert (own.loss_scale, own.skipped_steps) == (2.0 ** (16 - overflows), overflows)
    assert all(p.isfinite().all() for p in net.parameters())
    assert losses[-1] < losses[0] / 2


class Chain(nn.Module):
    """Products whose gradients can be made to overflow at any of them."""

    DEPTH = 3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(self.DEPTH))

    def forward(self, x: Tensor, boosts: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(Boost.apply(layer(x), boosts[i]))
        return x


class Boost(torch.autograd.Function):
    """The identity; backward it multiplies by ``boost``."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, boost: Tensor) -> Tensor:
        ctx.save_for_backward(boost)
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        (boost,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * boost.to(gradient.dtype), None


OVERFLOWS = 200


@pytest.mark.parametrize("kind", exhaustive(["sgd", "adamw"], always=["adamw"]))
def test_hundreds_of_overflows_change_nothing_on_a_skipped_step(kind: str) -> None:
    """At random steps and places; parameters and state must not move by a bit."""
    net, scaler, chance = Chain(), make_scaler(2.0**4, growth_interval=3, min_scale=1.0), random.Random(5)
    compiled = compile_scaled(net, scaler, "aot_eager")
    make = {"sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9), "adamw": lambda p: torch.optim.AdamW(p, 0.01)}
    optimizer, overflows = make[kind](net.parameters()), 0
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    while overflows < OVERFLOWS:
        boosts = torch.ones(Chain.DEPTH)
        bad = chance.random() < 0.9
        if bad:
            boosts[chance.randrange(Chain.DEPTH)] = chance.choice([float("inf"), float("nan"), -float("inf")])
        before = snapshot(list(net.parameters()), [optimizer])
        optimizer.zero_grad()
        scaler.scale(compiled(x, boosts).square().sum()).backward()
        assert scaler.step(optimizer, return_skipped=True).skipped is bad
        scaler.update()
        if bad:
            assert_same(snapshot(list(net.parameters()), [optimizer]), before)
        else:
            assert any(not torch.equal(p, old) for p, old in zip(net.parameters(), before[0], strict=True))
        overflows += bad
    assert scaler.skipped_steps == OVERFLOWS
    assert all(p.isfinite().all() for p in net.parameters())
