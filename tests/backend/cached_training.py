"""Trains with and without a scaler, in the order that is asked for: ``python cached_training.py TOKEN SCALE...``."""

import sys

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxamp


class Net(nn.Module):
    """``token`` becomes a constant of the graph: code for one is no code for another."""

    def __init__(self, token: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.token = token

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) + self.token


def train(scale: float | None, token: float) -> tuple[bool, bool, bool | None]:
    """Whether a gradient of 2**-30 survives and one of 2**20 is finite; and whether its overflow is flagged."""
    torch._dynamo.reset()
    net, x = Net(token), torch.ones(2, 4)
    scaler = fxamp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    net.compile(backend="fxamp", options={"policy": "cpu-float16", "scaler": scaler})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler.scale(net(x).sum() * 2.0**-30).backward()
    survives = bool(net.a.weight.grad.any())
    optimizer.zero_grad()
    scaler.scale(net(x).sum() * 2.0**20).backward()
    finite = bool(net.a.weight.grad.isfinite().all())
    return survives, finite, scaler.step(optimizer, return_skipped=True).skipped


if __name__ == "__main__":
    for text in sys.argv[2:]:
        print(*train(None if text == "None" else float(text), float(sys.argv[1])))
    print("hits", counters["inductor"]["fxgraph_cache_hit"])
