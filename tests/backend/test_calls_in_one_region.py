"""A model that a program calls several times in one autocast region, as a GAN calls its critic.

Autocast casts a weight once for all calls in a region (its cache), and sums their gradients in 16 bits. A compiled
graph casts for itself, under torch.compile too, and the gradients of several calls are summed in float32: the numbers
are those of ``torch.autocast(..., cache_enabled=False)``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.exhaustive import exhaustive
from torch import Tensor, nn
from torch.nn.functional import softplus

import fxamp

STEPS = 4


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 16)

    def forward(self, noise: Tensor) -> Tensor:
        return self.head(self.body(noise).relu())


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


def train(
    prepare: Callable[..., list[Any]], autocast: dict[str, Any], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Train a GAN; ``prepare`` compiles its models, and returns a scaler or None for each. Return all weights."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    models = [Generator().to(dtype), Critic().to(dtype)]
    scalers = prepare(*models)
    generator, critic = models
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    batches = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, noise = (torch.randn(16, size, generator=batches).to(dtype) for size in (16, 8))
        for turn in (1, 0):
            with torch.autocast("cpu", **autocast):
                made = generator(noise).to(dtype)
                wrong = critic(made.detach() if turn else made).to(dtype)
                loss = (softplus(-critic(x).to(dtype)) + softplus(wrong)) if turn else softplus(-wrong)
            step(loss.mean(), optimizers[turn], scalers[turn])
            for optimizer in optimizers:
                optimizer.zero_grad()
    return [weight.detach().double() for model in models for weight in model.parameters()]


def step(loss: Tensor, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    if scaler is None:
        loss.backward()
        optimizer.step()
        return
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def scalers_of(kind: type[torch.amp.GradScaler], number: int) -> list[Any]:
    made = [kind("cpu", init_scale=256.0) for _ in range(number)]
    return made * (3 - number) if made else [None, None]


def distance(weights: list[Tensor], others: list[Tensor]) -> float:
    return sum((a - b).square().sum().item() for a, b in zip(weights, others, strict=True)) ** 0.5


@pytest.mark.parametrize("scalers", exhaustive([0, 1, 2], always=[0, 2]))
@pytest.mark.parametrize("dtype", exhaustive([torch.bfloat16, torch.float16], always=[torch.bfloat16]))
@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_the_numbers_are_those_of_autocast_without_its_cache(scalers: int, dtype: torch.dtype, lowering: str) -> None:
    policy = f"cpu-{str(dtype).removeprefix('torch.')}"

    def compiled(*models: nn.Module) -> list[Any]:
        own = scalers_of(fxamp.GradScaler, scalers)
        for model, scaler in zip(models, own, strict=True):
            options = {"policy": policy, "lowering": lowering} | ({} if scaler is None else {"scaler": scaler})
            model.compile(backend="fxamp", options=options)
        return own

    def alone(*models: nn.Module) -> list[Any]:
        return scalers_of(torch.amp.GradScaler, scalers)

    ours = train(compiled, {"enabled": False})
    cached, theirs = (train(alone, {"dtype": dtype, "cache_enabled": cache}) for cache in (True, False))
    exact = train(lambda *_: [None, None], {"enabled": False}, torch.float64)

    assert distance(ours, theirs) == 0
    assert 0 < distance(ours, cached) < distance(ours, exact)
    assert distance(ours, exact) <= distance(cached, exact)
