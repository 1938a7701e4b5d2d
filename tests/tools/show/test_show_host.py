"""A policy for GPUs that keeps values in host memory, looked at without one."""

from pathlib import Path

import pytest

from fxamp.tools.show.command import main

PROGRAM = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.products = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x):
        for product in self.products:
            x = torch.tanh(product(x))
        return x.sum()

model, inputs = Net(), (torch.zeros(4096, 256),)
"""
POLICY = """extends = ["{}-bfloat16"]

[[rule]]
id = "away"
keep = "host"
region = "kept"
ops = ["tanh"]
"""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_the_host_keeps_is_listed(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(PROGRAM)
    (tmp_path / "host.toml").write_text(POLICY.format(device))
    arguments = [str(tmp_path / "net.py"), "--policy", str(tmp_path / "host.toml"), "--kept", "--width", "200"]
    assert main(arguments) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "away" in line]
    assert lines
    for line in lines:
        if device == "cuda":
            assert " host " in line and "4.0 MiB" in line and " 0 B " in line
        else:
            assert " host " not in line and "it is in the host's memory already" in line
