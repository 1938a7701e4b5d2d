"""graph_norm: the norm of the gradients comes out of the compiled backward, or from the gradients where it cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once
from torch import Tensor, nn

import fxamp
import fxamp.kernels

INF = float("inf")


class Net(nn.Module):
    """Two parameters, ``one`` and ``two``, have the very same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.one, self.two = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) + self.one + self.two).relu()).square().mean()


class Broken(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return self.last((hidden + self.one + self.two).relu()).square().mean()


class Setting:
    def __init__(self, net: type[Net] = Net, lowering: str = "aot_eager", **arguments: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = net()
        self.scaler = fxamp.GradScaler("cpu", init_scale=2.0**8, graph_norm=True, **arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        options = {"policy": "cpu-float16", "scaler": self.scaler, "lowering": lowering}
        self.compiled: Callable[[Tensor], Tensor] = torch.compile(self.model, backend="fxamp", options=options)

    def backward(self, factor: float = 1.0) -> None:
        self.scaler.scale(self.compiled(torch.randn(3, 4)) * factor).backward()

    def true_norm(self) -> float:
        return float(torch.linalg.vector_norm(torch.cat([p.grad.flatten().double() for p in self.model.parameters()])))

    def norm(self) -> float:
        return self.scaler.clip_grad_norm_(self.optimizer, 1e9).item()


UNDER_INDUCTOR = pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.exhaustive])  # as in test_kernel_ops


@pytest.mark.parametrize("lowering", ["aot_eager", UNDER_INDUCTOR])
@pytest.mark.parametrize("skip", ["host", "device"])
def test_the_backward_makes_the_norm_and_nothing_else_reads_the_gradients(
    skip: str, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(lowering=lowering, skip=skip, step_lowering="aot_eager")
    monkeypatch.setattr(fxamp.kernels, "check_", None)
    monkeypatch.setattr(fxamp.kernels, "check_unscale_", None)
    for _ in range(3):
        setting.optimizer.zero_grad()
        setting.backward()
        reference = setting.true_norm()
        assert setting.norm() == pytest.approx(reference, rel=1e-6) and reference > 0
        setting.scaler.step(setting.optimizer)
        setting.scaler.update()
    assert setting.scaler.skipped_steps == 0


def test_gradients_are_clipped_to_it() -> None:
    setting = Setting()
    setting.backward()
    before = setting.true_norm()
    setting.scaler.clip_grad_norm_(setting.optimizer, before / 3)
    assert setting.true_norm() == pytest.approx(before / 3, rel=1e-4)


def accumulated(setting: Setting) -> None:
    setting.backward()


def changed(setting: Setting) -> None:
    setting.model.one.grad.mul_(5.0)


def one_is_missing(setting: Setting) -> None:
    group = setting.optimizer.param_groups[0]
    group["params"] = [parameter for parameter in group["params"] if parameter is not setting.model.two]
    setting.model.two.grad.zero_()


@each_once("event, net", [accumulated, changed, one_is_missing, None], [Net, Broken])
def test_where_the_backward_cannot_know_the_gradients_are_read(
    net: type[Net], event: Callable[[Setting], None] | None
) -> None:
    setting = Setting(net)
    setting.backward()
    if event is not None:
        event(setting)
    assert setting.norm() == pytest.approx(setting.true_norm(), rel=1e-6)


@pytest.mark.parametrize("skip", ["host", "device"])
def test_an_overflow_skips_the_step(skip: str) -> None:
    setting = Setting(skip=skip, step_lowering="aot_eager")
    for factor in (1.0, 1.0, INF):
        before = [parameter.detach().clone() for parameter in setting.model.parameters()]
        setting.optimizer.zero_grad()
        setting.backward(factor)
        setting.scaler.clip_grad_norm_(setting.optimizer, 1.0)
        setting.scaler.step(setting.optimizer)
        setting.scaler.update()
    assert setting.scaler.skipped_steps == 1
    assert_equal([*setting.model.parameters()], before)
