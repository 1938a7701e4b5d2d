"""``F.grouped_mm``: autocast has no category for it, so programs cast its operands, and get the numbers of autocast."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Experts(nn.Module):
    """Rows sorted by expert, and where the rows of each expert end."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(16, 16)
        self.up = nn.Parameter(torch.randn(3, 16, 32) / 4)
        self.down = nn.Parameter(torch.randn(3, 32, 16) / 6)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        hidden = F.grouped_mm(self.read(x).bfloat16(), self.up.bfloat16(), offs=ends)
        output = F.grouped_mm(F.silu(hidden), self.down.bfloat16(), offs=ends)
        return output.float().square().mean()


def gradients(call: nn.Module, x: Tensor, ends: Tensor) -> list[Tensor]:
    loss = call(x, ends)
    return [loss.detach(), *torch.autograd.grad(loss, [*call.parameters(), x])]


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_grouped_products_are_those_of_eager_autocast(lowering: str) -> None:
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(10, 16, requires_grad=True)
    ours = copy.deepcopy(model)
    ours.compile(backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": lowering})
    for ends in ([3, 5, 10], [0, 4, 10]):
        offsets = torch.tensor(ends, dtype=torch.int32)
        with torch.autocast("cpu", torch.bfloat16):
            expected = gradients(model, x, offsets)
        values = gradients(ours, x, offsets)
        assert all(value.isfinite().all() and torch.equal(value, o) for value, o in zip(values, expected, strict=True))
