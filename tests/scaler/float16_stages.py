"""Chains of stages that compute in float16, some compiled, and their gradients by torch's scaler and by fxamp's."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from support.oracles.scaled_runs import named
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd

import fxamp

SCALE = 2.0**24
TINY = 2.0**-27
"""Gradients around this are zero in float16; times the scale they are far from its subnormals."""
LOWERINGS = ("aot_eager", "eager")
EPS = torch.finfo(torch.float16).eps

Run = Callable[[nn.Module, Any, Any], object]


class Mixed(torch.autograd.Function):
    """Computes in float16 under autocast, between float32 results and float32 inputs."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x.half(), w.half())
        return (x @ w).float()

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return (gradient.half() @ w.t()).float(), (x.t() @ gradient.half()).float()


class Several(torch.autograd.Function):
    """Takes float16 and float32, and returns both: its backward gets both, and returns both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x @ w.half(), x.float() * w[0]

    @staticmethod
    def backward(ctx: Any, narrow: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        by_weight = x.t().float() @ narrow.float()
        by_weight[0] += (x.float() * wide).sum(0)
        return narrow @ w.half().t() + (wide * w[0]).half(), by_weight


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return Mixed.apply(x.float(), self.weight) * 2


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        narrow, wide = Several.apply(x.half(), self.weight)
        return narrow * 2 + wide


class InPlace(nn.Module):
    """Writes float16 into a part of a float32 tensor, and reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result = x.float() * 2
        result[:, :4] = self.linear(x)[:, :4]
        result[:, 4:].add_(result[:, :4], alpha=2)
        return result


class Branches(nn.Module):
    """A float16 branch and a float32 one, an op of both, a sum of several uses; a norm with float32 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        half = self.one(x)
        wide = half.float().exp() * self.two.weight.sum()
        return self.norm(self.two(half) + half * x) + wide


STAGES: dict[str, type[nn.Module]] = {
    "linear": Linear,
    "custom": Custom,
    "mixture": Mixture,
    "in place": InPlace,
    "branches": Branches,
}


class Chain(nn.Module):
    """Stages one after the other; ``compiled`` says which of them are."""

    def __init__(self, stages: Sequence[type[nn.Module]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(stage() for stage in stages)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def compile_stages(chain: Chain, which: str, **options: Any) -> None:
    """By a letter for each stage: c is compiled by fxamp, o by another backend, e stays eager."""
    for stage, letter in zip(chain.stages, which, strict=True):
        if letter == "c":
            stage.compile(backend="fxamp", options=options)
        elif letter == "o":
            stage.compile(backend="aot_eager")


def data(seed: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def forward(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return net(x)


def loss_of(result: Tensor) -> Tensor:
    return result.float().square().mean() * TINY


def once(net: nn.Module, scaler: Any, x: Tensor) -> None:
    scaler.scale(loss_of(forward(net, x))).backward()


def by_torch(net: nn.Module, run: Run = once, scale: float = SCALE) -> dict[str, Tensor]:
    net, scaler, x = copy.deepcopy(net), torch.amp.GradScaler("cpu", init_scale=scale), data().requires_grad_()
    run(net, scaler, x)
    scaler.unscale_(torch.optim.SGD([*net.parameters(), x], lr=0.1))
    return named(net, [x])


def by_fxamp(net: Any, which: str, lowering: str, run: Run = once, scale: float = SCALE) -> dict[str, Tensor]:
    net, scaler, x = copy.deepcopy(net), fxamp.GradScaler("cpu", init_scale=scale), data().requires_grad_()
    compile_stages(net, which, scaler=scaler, lowering=lowering)
    scaler.attach()
    run(net, scaler, x)
    scaler.unscale_(torch.optim.SGD([*net.parameters(), x], lr=0.1))
    return named(net, [x])


def assert_close(got: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Within a few roundings to float16, where a graph's border in float32 spares one."""
    assert reference and got.keys() == reference.keys()
    for name, gradient in reference.items():
        assert gradient.any() and gradient.abs().max() < 2.0**-18, name
        assert (got[name] - gradient).norm() <= 8 * EPS * gradient.norm(), name
