"""The errors that ``fxamp-policy fit`` measures, compared with those of other seeds."""

from pathlib import Path

import pytest
from policy_runs import written

from fxamp.tools.policy.batches import load_work
from fxamp.tools.policy.fit.errors import Measuring
from fxamp.tools.policy.patch import base_policy

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.up = nn.Linear(128, 512)
        self.down = nn.Linear(512, 128)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1024, 128)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 1024)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())

torch.manual_seed(0)
model = Net()
inputs = (torch.randint(1024, (4, 64)),)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["cuda-bfloat16", "cuda-bfloat16-lean"])
def test_the_error_is_that_of_other_seeds(name: str, tmp_path: Path) -> None:
    file = written(tmp_path, MODEL)
    work = load_work(file, lambda _: None)
    policy = base_policy(name, work, lambda _: None, runs=True, emulate=True)[1]
    few, many = (Measuring(work, tuple(work.batches()), draws).error(policy) for draws in (range(2), range(2, 8)))
    assert few == pytest.approx(many, rel=0.1)
