"""What the README promises of equality, bit for bit, with dropout in 16 bits, which AOTAutograd decomposes."""

import copy

import pytest
import torch
from support.checks.equality import assert_equal
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, dropped: float) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(8, 32), nn.Dropout(dropped), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.body(x).relu())).log_softmax(-1)


def trained(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.linspace(-1, 1, 64).reshape(8, 8)).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("dropped", [0.0, 0.3])
def test_lowerings_equal_what_they_are_named_after(dropped: float) -> None:
    models = [Net(dropped)]
    models += [copy.deepcopy(models[0]) for _ in range(3)]
    models[1].compile(backend="fxamp", options={"lowering": "eager"})
    models[2].compile(backend="aot_eager")
    models[3].compile(backend="fxamp", options={"lowering": "aot_eager"})
    eager, ours, by_torch, ours_by_torch = map(trained, models)
    assert_equal(eager, ours)
    assert_equal(by_torch, ours_by_torch)
    assert all(map(torch.equal, eager, by_torch)) == (dropped == 0)
