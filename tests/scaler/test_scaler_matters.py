"""Why scale at all: float16 gradients that underflow without it, and a scale that overflows and recovers."""

import torch
from torch import Tensor, nn

from fxamp.scaler import GradScaler

STEPS = 20
SMALLEST = 2.0**-24
"""float16's smallest subnormal: what is below half of it becomes zero."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(scaler: GradScaler, loss_factor: float) -> tuple[list[float], list[Tensor], list[bool]]:
    """Train under float16 autocast on a loss times ``loss_factor``, which the learning rate makes good."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 / loss_factor)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    losses, skips = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = net(x)
        loss = (output.float() - y).square().mean() * loss_factor
        scaler.scale(loss).backward()
        skips.append(scaler.step(optimizer, return_skipped=True).skipped)
        scaler.update()
        losses.append(loss.item() / loss_factor)
    return losses, [p.detach() for p in net.parameters()], skips


def test_gradients_that_underflow_train_only_when_scaled() -> None:
    factor = SMALLEST / 8
    losses, parameters, _ = train(GradScaler("cpu", enabled=False), factor)
    assert losses == losses[:1] * STEPS
    assert all(torch.equal(p, q) for p, q in zip(parameters, model().parameters(), strict=True))
    losses, _, skips = train(GradScaler("cpu", init_scale=2.0**16), factor)
    assert losses[-1] < losses[0] / 2
    assert not any(skips)


def test_a_scale_that_overflows_backs_off_until_training_goes_on() -> None:
    scaler = GradScaler("cpu", init_scale=2.0**16)
    losses, parameters, skips = train(scaler, 1.0)
    overflows = sum(skips)
    assert 0 < overflows < STEPS / 2
    assert skips == [True] * overflows + [False] * (STEPS - overflows)
    assert losses[: overflows + 1] == losses[:1] * (overflows + 1)
    assert scaler.get_scale() == 2.0 ** (16 - overflows)
    assert scaler.skipped_steps == overflows
    assert all(p.isfinite().all() for p in parameters)
    assert losses[-1] < losses[0] / 2
