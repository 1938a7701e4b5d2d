"""Compiled code on disk and in memory: a scaled backward is never served for an unscaled one, nor the other way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = '''
import torch
from torch import nn
import fxamp

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))

def train(scale):
    """First gradient with and without a scaler; whether an overflow is flagged."""
    torch._dynamo.reset()
    net, x = Net(), torch.ones(2, 4)
    scaler = fxamp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    net.compile(backend="fxamp", options={"policy": "cpu-float16", "scaler": scaler})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler.scale(net(x).sum() * 2.0**-30).backward()
    seen = [bool(net.a.weight.grad.any())]
    optimizer.zero_grad()
    scaler.scale(net(x).sum() * 2.0**20).backward()
    seen.append(bool(net.a.weight.grad.isfinite().all()))
    seen.append(scaler.step(optimizer, return_skipped=True).skipped)
    return seen

for scale in SCALES:
    print(scale, *train(scale))
from torch._dynamo.utils import counters
print("hits", counters["inductor"]["fxgraph_cache_hit"])
'''

UNSCALED = "None False False False"
SCALED = "1048576.0 True False True"
"""A gradient of 2**-30 survives; one of 2**20 overflows either way, and the scaler sees it."""


@pytest.mark.inductor
def test_with_without_and_with_again_in_one_process_and_the_next(tmp_path: Path) -> None:
    scales = ["[2.0**20, None, 2.0**20]", "[None, 2.0**20, None]"]
    wanted = [[SCALED, UNSCALED, SCALED], [UNSCALED, SCALED, UNSCALED]]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for number, (given, expected) in enumerate(zip(scales, wanted, strict=True)):
        script = PROGRAM.replace("SCALES", given)
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        *lines, hits = done.stdout.splitlines()
        assert lines == expected
        # The second process must have met the first one's code, or it shows nothing.
        assert number == 0 or int(hits.removeprefix("hits ")) > 0
