"""A rewritten module is shipped by torch.export: under its own names, with autocast's results, through a file."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxamp


class Net(nn.Module):
    """A buffer and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)
        self.again = self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.body(self.head(self.norm(self.body(x)).relu())))


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.mark.parametrize("exported", [False, True], ids=["module", "exported program"])
def test_it_keeps_its_names_and_gives_autocasts_results(exported: bool, tmp_path: Path) -> None:
    model, x = net(), torch.randn(3, 4)
    source = torch.export.export(model, (x,)) if exported else model
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(x)

    rewritten = fxamp.rewrite(source, (x,), policy="cpu-bfloat16")
    torch.export.save(torch.export.export(rewritten, (x,)), tmp_path / "net.pt2")
    program = torch.export.load(tmp_path / "net.pt2")

    assert list(rewritten.state_dict()) == list(model.state_dict()) and sorted(program.state_dict) == sorted(
        model.state_dict()
    )
    result = program.module()(x)
    assert result.dtype == torch.bfloat16 and torch.equal(result, expected)
