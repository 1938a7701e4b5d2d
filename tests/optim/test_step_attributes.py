"""Tensors that an optimizer holds besides its state: compiled steps read and write them as eager ones, or name them."""

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once
from support.programs.user_optimizers import EachParameter
from torch import Tensor, nn

import fxamp
from fxamp.optim import CompiledOptimizer

INF = float("inf")


class Held(torch.optim.Optimizer):
    """SGD with momentum, and tensors of its own; ``moved`` writes to them and returns the learning rate."""

    def __init__(self, parameters: Any, moved: Callable[["Held", dict[str, Any], dict[str, Any]], Any]) -> None:
        super().__init__(parameters, {"lr": 0.1, "count": torch.zeros(())})
        self.rate, self.steps, self._moved = torch.tensor(0.0), torch.tensor(0.0), moved

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for at, parameter in enumerate(group["params"]):
                state = self.state[parameter]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(parameter))
                state["step"] += 1
                state["mean"].lerp_(parameter.grad, 0.1)
                rate = self._moved(self, group, state) if at == 0 or self._moved is filled else self.rate
                parameter.sub_(rate * state["mean"])


def filled(optimizer: Held, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    """Settings as tensors, so that torch.compile does not compile again for each value."""
    optimizer.rate.fill_(group["lr"])
    optimizer.steps.fill_(state["step"])
    return optimizer.rate / (1 - 0.9**optimizer.steps)


def advanced(optimizer: Held, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    """Counters that are attributes."""
    optimizer.steps.add_(1)
    optimizer.rate.copy_(group["lr"] / optimizer.steps)
    return optimizer.rate


def in_group(optimizer: Held, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    """A counter among the settings."""
    group["count"].add_(1)
    optimizer.rate.copy_(group["lr"] / group["count"])
    return optimizer.rate


def replaced(optimizer: Held, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    optimizer.steps = optimizer.steps + 1
    return group["lr"] / optimizer.steps


def read(optimizer: Held, group: dict[str, Any], state: dict[str, Any]) -> float:
    return group["lr"] / float(state["step"])


def train(moved: Any, how: str, lowering: str = "aot_eager", bad: tuple[int, ...] = ()) -> tuple[Held, list[Tensor]]:
    """Six steps of a schedule, eager or compiled; ``bad``: the steps that overflow, of a scaler."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,))]
    optimizer = Held(parameters, moved)
    scaler = torch.amp.GradScaler("cpu", 8.0, enabled=bool(bad))
    if how == "compiled" and bad:
        scaler = fxamp.GradScaler("cpu", 8.0, skip="device", step_lowering=lowering)
    elif how == "compiled":
        fxamp.compile_optimizer(optimizer, lowering=lowering)
    scaler.scale(torch.zeros(()))
    for at in range(6):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - at / 10)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * scaler.get_scale()
        if at in bad:
            parameters[0].grad[0, 0] = INF  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        if at == 3:
            optimizer.steps = optimizer.steps.clone()  # another object takes its place
    held = [optimizer.rate, optimizer.steps, optimizer.param_groups[0]["count"]]
    return optimizer, [*map(Tensor.detach, parameters), *held]


@each_once(
    "moved, bad, lowering",
    [filled, advanced, in_group],
    [(), (2, 4)],
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)],
)
def test_tensors_beside_the_state_are_inputs(moved: Any, bad: tuple[int, ...], lowering: str) -> None:
    ours, values = train(moved, "compiled", lowering, bad)
    _, reference = train(moved, "eager", bad=bad)
    step = CompiledOptimizer.of(ours)
    assert step.reasons == () and step.compilations >= 1
    torch.testing.assert_close(values, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("moved", "message"),
    [(replaced, "its step replaces 'steps'"), (read, r"test_step_attributes.py:\d+: .*float\(state\[.step.\]\)")],
)
def test_what_cannot_be_compiled_is_named_and_runs_as_it_is(
    moved: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="fxamp.optim"):
        ours, values = train(moved, "compiled")
    assert_equal(values, train(moved, "eager")[1])
    assert CompiledOptimizer.of(ours).compilations == 0
    (record,) = caplog.records
    assert record.message.startswith("Held: its step runs uncompiled: ")
    assert re.search(message, record.message)


def test_a_tensor_that_is_no_number_is_named(caplog: pytest.LogCaptureFixture) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.table = torch.ones(2)  # type: ignore[attr-defined]
    fxamp.compile_optimizer(optimizer)
    parameter.grad = torch.ones(3)
    with caplog.at_level(logging.WARNING, logger="fxamp.optim"):
        optimizer.step()
    assert "its attribute 'table' is a Tensor of shape [2] on cpu; accepted" in caplog.text
    assert torch.equal(parameter, torch.full((3,), 0.9))


class Factor:
    __slots__ = ("__weakref__", "value")

    def __init__(self, value: float) -> None:
        self.value = value


class Factored(EachParameter):
    """SGD times a factor, which is no tensor and no number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.factor = Factor(1.0)

    def step_one(self, parameter: Any, group: dict[str, Any]) -> None:
        self.state[parameter]["seen"] = True
        parameter.sub_(parameter.grad, alpha=self.factor.value)


def test_an_object_at_the_address_of_a_freed_one_is_another() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = fxamp.compile_optimizer(Factored([parameter]), lowering="aot_eager")
    assert isinstance(optimizer, Factored)
    seen, reused = set(), False
    for at in range(40):  # a compilation may take the freed object's place
        tries = [Factor(2.0**at)]
        while id(tries[-1]) not in seen and len(tries) < 20_000:
            tries.append(Factor(2.0**at))
        reused = id(tries[-1]) in seen
        optimizer.factor = tries[-1]
        del tries
        seen.add(id(optimizer.factor))
        parameter.data.zero_()
        parameter.grad = torch.ones(3)
        optimizer.step()
        assert torch.equal(parameter, torch.full((3,), -(2.0**at)))
        if reused:
            return
    raise AssertionError("no address was used again")
