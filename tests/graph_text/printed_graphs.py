"""Graphs as the installed torch makes and prints them: Dynamo's, AOTAutograd's, torch.export's, symbolic_trace's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch.fx import GraphModule
from torch.nn import functional as F


class Scale(torch.autograd.Function):
    """A custom function: it becomes a higher-order op with two bodies."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        (w,) = ctx.saved_tensors
        return gradient * w, gradient


class Mlp(nn.Module):
    """Linear layers, a norm, a loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x):
        return F.cross_entropy(self.layers(x), torch.arange(x.shape[0]) % 4)


class Convolution(nn.Module):
    """A residual block with batch norm, whose buffers are written to."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x):
        return (x + F.relu(self.norm(self.conv(x)), inplace=True)).mean((2, 3)).sum()


def branches(x: torch.Tensor) -> torch.Tensor:
    y = torch.utils.checkpoint.checkpoint(lambda t: (t @ t.t()).relu(), x, use_reentrant=False)
    return torch.cond(y.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (y,)).sum()


def operators(x: torch.Tensor) -> torch.Tensor:
    y = -x + 2 * x**2 - x / 3 + (x.detach() // 2) % 5
    y[0] = 1.0
    y[1:, ::2] += x[1:, ::2]
    y *= 2
    mask = (y > 0) & ~(y >= 3) | (y == 1)
    first, second = y.split(2, -1)
    return torch.where(mask, y, float("-inf")).clamp(min=-1e30).sum() + (first @ second.t()).unbind(0)[-1].sum()


def custom(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        w = x @ x.t()
    return Scale.apply(x, w.float()[:, :1].expand(-1, 4)).view(-1).sum()


PROGRAMS: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "mlp": (Mlp(), torch.ones(3, 4)),
    "convolution": (Convolution(), torch.ones(2, 2, 4, 4)),
    "branches": (branches, torch.ones(3, 4)),
    "operators": (operators, torch.ones(3, 4)),
    "custom": (custom, torch.ones(3, 4)),
}


def graphs_of(program: Callable[..., Any], x: torch.Tensor, dynamic: bool = False) -> list[tuple[str, GraphModule]]:
    """Dynamo's graphs and AOTAutograd's of a call of ``program``, each with what it is, in the order they are made."""
    graphs: list[tuple[str, GraphModule]] = []

    def take(stage: str) -> Callable[..., Any]:
        def compiler(gm: GraphModule, inputs: list[Any]) -> Any:
            graphs.append((stage, gm))
            return make_boxed_func(gm.forward)

        return compiler

    def partition(gm: GraphModule, *rest: Any, **more: Any) -> tuple[GraphModule, GraphModule]:
        graphs.append(("joint", gm))
        return default_partition(gm, *rest, **more)

    aot = aot_autograd(fw_compiler=take("forward"), bw_compiler=take("backward"), partition_fn=partition)

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        graphs.append(("dynamo", gm))
        return aot(gm, inputs)

    x = x.clone().requires_grad_()
    if dynamic:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    torch.compile(program, backend=backend)(x).backward()
    return graphs
