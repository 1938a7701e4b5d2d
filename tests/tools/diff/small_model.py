"""The model file of the tests of ``--graph`` and ``--run``: two linear layers, a norm between them, a loss."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.lm_head = torch.nn.Linear(64, 8)

    def forward(self, x, target):
        hidden = self.norm(self.up(x)).relu()
        return torch.nn.functional.cross_entropy(self.lm_head(hidden), target)

torch.manual_seed(0)
model = Net()
inputs = (torch.randn(32, 16), torch.randint(8, (32,)))
"""


def defined(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    space: dict[str, Any] = {}
    exec(compile(Path(name).read_text(), name, "exec"), space)
    return space["model"], space["inputs"]
