"""A step whose graph AOTAutograd's cache may hold: ``python stored_step.py FACTOR POLICY SCALED NET``."""

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxamp


class Net(nn.Module):
    """Two results, of which the step uses one; ``factor`` is a constant of the graph."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head, self.factor = nn.Linear(16, 16), nn.Linear(16, 16), factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.relu(self.inner(x)))
        return logits.float().pow(2).mean() * self.factor, logits


class Convolution(Net):
    """With convolutions, for which Inductor chooses layouts that were not traced, and statistics that it updates."""

    def __init__(self, factor: float) -> None:
        super().__init__(factor)
        self.inner = nn.Sequential(
            nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, bias=False), nn.Flatten()
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x.reshape(-1, 4, 5, 5))


class Single(Net):
    """One result that needs a gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = super().forward(x)
        return loss, logits.detach()


#: The nets by name, with the number of features of an example.
NETS: dict[str, tuple[type[Net], int]] = {
    "linear": (Net, 16),
    "convolution": (Convolution, 100),
    "single": (Single, 16),
}


def net_and_examples(name: str, factor: float) -> tuple[Net, Tensor]:
    """A net and four examples for it."""
    kind, features = NETS[name]
    return kind(factor), torch.linspace(-1, 1, 4 * features).reshape(4, features)


def step(factor: float, policy: str, scaled: bool, name: str) -> dict[str, Any]:
    """The gradients of two backwards, the second through both results, what the scaler found, and what was cached."""
    torch._dynamo.reset()
    counters.clear()
    scaler = fxamp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    net, x = net_and_examples(name, factor)
    model = torch.compile(net, backend="fxamp", options={"policy": policy, "scaler": scaler})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    gradients, scales = [], []
    for spoiled in (False, True):
        optimizer.zero_grad()
        loss, logits = model(x)
        scaler.scale(loss + logits.float().sum() * torch.inf if spoiled else loss).backward()
        gradients.append([parameter.grad.flatten().tolist() for parameter in net.parameters()])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.loss_scale)
    hits = {name: counters[name][f"{cache}_cache_hit"] for name, cache in CACHES.items()}
    misses = {name: counters[name][f"{cache}_cache_miss"] for name, cache in CACHES.items()}
    kept_values = [str(value) for graph in fxamp.report(model).graphs for value in graph.kept]
    return {"gradients": gradients, "scales": scales, "hits": hits, "misses": misses, "kept": kept_values}


CACHES = {"aot_autograd": "autograd", "inductor": "fxgraph"}


def by_autocast(factor: float, dtype: torch.dtype, name: str) -> list[Tensor]:
    """The gradients of the first backward under eager autocast."""
    net, x = net_and_examples(name, factor)
    with torch.autocast("cpu", dtype):
        loss, _ = net(x)
    (loss * 1024).backward()
    return [parameter.grad.flatten() / 1024 for parameter in net.parameters()]


if __name__ == "__main__":
    print(json.dumps(step(float(sys.argv[1]), sys.argv[2], sys.argv[3] == "True", sys.argv[4])))
