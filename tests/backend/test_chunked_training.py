"""Losses in chunks in a float16 run with a scaler: small gradients, overflow, and gradients of several batches."""

import copy
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from torch import Tensor, nn
from torch.nn import functional as F

import fxamp
from fxamp.policy import Policy, Rule

ROWS, WIDTH, CLASSES = 1 << 11, 8, 16
BASE = Policy.load("cpu-float16")
CUT = Rule("cut", ops=("cross_entropy_loss",), chunks=512)
CHUNKED = Policy("mine", "cpu", "float16", rules=(*BASE.rules, CUT))


class Net(nn.Module):
    """A head whose small weights make gradients below the least of float16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.head.weight.data /= 10000

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), target)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(2, (ROWS,), generator=generator)


def compiled(net: Net, scaler: fxamp.GradScaler | None) -> Any:
    torch._dynamo.reset()
    options: dict[str, Any] = {"policy": CHUNKED, "lowering": "aot_eager"}
    return torch.compile(net, backend="fxamp", options=options | ({"scaler": scaler} if scaler else {}))


def gradients(net: Net) -> list[Tensor]:
    return [parameter.grad.double() for parameter in net.parameters() if parameter.grad is not None]


def errors(net: Net, batches: int) -> list[float]:
    """Of each parameter's gradient, over the size of the gradient in float64."""
    exact = copy.deepcopy(net).double()
    exact.zero_grad()
    for seed in range(batches):
        x, target = batch(seed)
        exact(x.double(), target).backward()
    truths = gradients(exact)
    return [float((one - truth).norm() / truth.norm()) for one, truth in zip(gradients(net), truths, strict=True)]


@pytest.mark.exhaustive
def test_a_scaler_keeps_gradients_that_underflow_without() -> None:
    with_scaler, without = Net(), Net()
    scaler = fxamp.GradScaler("cpu", init_scale=2.0**12)
    run = compiled(with_scaler, scaler)
    for seed in range(2):  # gradients of two batches add up
        scaler.scale(run(*batch(seed))).backward()
    assert len(gradients(with_scaler)) == 4 and max(errors(with_scaler, 2)) < 2**-6
    compiled(without, None)(*batch(0)).backward()
    assert errors(without, 1)[0] > 0.5


def test_an_overflow_skips_the_step() -> None:
    net = Net()
    before = copy.deepcopy(net.state_dict())
    scaler, optimizer = fxamp.GradScaler("cpu", init_scale=2.0**60), torch.optim.SGD(net.parameters(), lr=1.0)
    scaler.scale(compiled(net, scaler)(*batch(0))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.state_dict()["scale"] == 2.0**59
    assert_equal(net.state_dict(), before)
