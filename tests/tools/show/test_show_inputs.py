"""``fxamp-show`` on a Python file that defines a model, under a policy of one's own."""

from pathlib import Path

import pytest

from fxamp.tools.show.command import main

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.norm(x)).exp()

model, inputs = Net(), (torch.randn(2, 8),)
"""

MINE = """
extends = ["cuda-float16"]
[[rule]]
id = "bare-exp"
cast = "lower_precision_fp"
ops = ["exp"]
why = "its inputs are negative"
[[rule]]
id = "typo"
cast = "fp32"
ops = ["expp"]
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(MODEL, encoding="utf-8")
    return str(path)


def test_a_policy_of_ones_own_is_checked(net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text(MINE, encoding="utf-8")
    assert main([net, "--policy", str(tmp_path / "mine.toml"), "--check"]) == 1
    out = capsys.readouterr().out
    assert "rule typo" in out and out.endswith("1 finding\n")
    assert main([net, "--policy", str(tmp_path / "mine.toml"), "--why", "exp"]) == 0
    out = capsys.readouterr().out
    assert "because    its inputs are negative" in out and "lost       pointwise-ranges" in out
