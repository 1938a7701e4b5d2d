"""Complex parameters: the oracle is torch's scaler, which takes none, on their real and imaginary parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp

STEPS = 4


class Spectrum(nn.Module):
    """A product that autocast lowers, and one of complex numbers; ``parts``: whose weight is pairs of real numbers."""

    def __init__(self, parts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(8, 4, dtype=torch.complex64)
        self.layer = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.view_as_real(weight) if parts else weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return (torch.fft.fft(self.layer(x).float()) @ weight).abs().mean()


def untouched(weight: Tensor) -> None:
    """Leave the gradient to the scaler."""


def halved(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(0.5)


def overflowed(weight: Tensor) -> None:
    assert weight.grad is not None
    parts = torch.view_as_real(weight.grad) if weight.grad.is_complex() else weight.grad
    parts[3, 1, 1] = float("inf")


def train(compiled: bool, edit: Callable[[Tensor], None], backwards: int, clip: bool) -> tuple[list[Tensor], float]:
    model = Spectrum(parts=not compiled)
    module: Any = fxamp if compiled else torch.amp
    scaler = module.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    options = {"scaler": scaler, "lowering": "aot_eager"}
    call = torch.compile(model, backend="fxamp", options=options) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        for batch in range(backwards):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(STEPS * batch + step))
            with torch.autocast("cpu", torch.float16):
                loss = call(x)
            scaler.scale(loss).backward()
        if step == 1:
            edit(model.weight)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    weights = [torch.view_as_real(p) if p.is_complex() else p for p in model.parameters()]
    return weights, scaler.loss_scale if compiled else scaler.get_scale()


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("edit", [untouched, halved, overflowed])
def test_training_equals_that_of_the_parts(edit: Callable[[Tensor], None], backwards: int, clip: bool) -> None:
    (weights, scale), (expected, theirs) = (train(compiled, edit, backwards, clip) for compiled in (True, False))
    assert scale == theirs
    rounding = {} if clip else {"rtol": 0.0, "atol": 0.0}  # the norms are sums in different orders
    torch.testing.assert_close(weights, expected, **rounding)
