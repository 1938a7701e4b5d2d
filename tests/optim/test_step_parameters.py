"""A compiled step finds each parameter as the optimizer's own step does, or it does not run compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.programs.user_optimizers import EachParameter
from torch import Tensor, nn

import fxamp
from fxamp.optim import CompiledOptimizer


class Asking(EachParameter):
    """Descends ``factor(optimizer, parameter)`` times as fast, and holds the parameters in a module too."""

    def __init__(self, parameters: Any, factor: Callable[["Asking", Any], float]) -> None:
        super().__init__(parameters, {"lr": 0.5})
        self.factor, self.model = factor, nn.ParameterList(self.param_groups[0]["params"])

    def step_one(self, parameter: Any, group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad, alpha=group["lr"] * self.factor(self, parameter))


def by_property(_optimizer: Asking, parameter: Any) -> float:
    return 1.0 if parameter.requires_grad and isinstance(parameter, nn.Parameter) else 4.0


def by_attribute(_optimizer: Asking, parameter: Any) -> float:
    return getattr(parameter, "lr_mult", 1.0)


def by_new_attribute(_optimizer: Asking, parameter: Any) -> float:
    parameter.steps = getattr(parameter, "steps", 0) + 1
    return float(parameter.steps)


def by_id(optimizer: Any, parameter: Any) -> float:
    return 3.0 if id(parameter) in optimizer.ids else 1.0


def by_key(optimizer: Any, parameter: Any) -> float:
    return float(optimizer.factors.get(parameter, 1.0))


def by_list(optimizer: Any, parameter: Any) -> float:
    return 3.0 if any(parameter is fast for fast in optimizer.param_groups[0]["fast"]) else 1.0


def clearing(_optimizer: Asking, parameter: Any) -> float:
    """The gradient of a step that has been taken is dropped, so that backwards do not add to it."""
    parameter.grad = parameter.grad.clone() if parameter.grad.numel() == 6 else None
    return 1.0


def stepped(factor: Callable[[Any, Any], float], compiled: bool) -> tuple[list[Tensor | None], Asking]:
    """Return the parameters and gradients after three steps, and their optimizer."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4))]
    optimizer: Any = Asking(parameters, factor)
    parameters[1].lr_mult = 3.0  # type: ignore[attr-defined]
    if factor is by_id:
        optimizer.ids = {id(parameters[1])}
    if factor is by_key:
        optimizer.factors = {parameters[1]: 3.0}
    if factor is by_list:
        optimizer.param_groups[0]["fast"] = [parameters[1]]
    if compiled:
        fxamp.compile_optimizer(optimizer, lowering="aot_eager")
    for at in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(at))
        optimizer.step()
    return [*(p.detach() for p in parameters), *(p.grad for p in parameters)], optimizer


@pytest.mark.parametrize(
    ("factor", "why"),
    [
        (by_property, None),
        (by_attribute, "its step reads 'lr_mult' of a parameter"),
        (by_new_attribute, "its step sets 'steps' of a parameter"),
        (by_id, "its 'ids' holds the ids of parameters"),
        (by_key, "its 'factors' holds parameters"),
        (by_list, "its 'fast' holds parameters"),
        (clearing, "its step sets the grad of a parameter"),
    ],
)
def test_a_step_finds_its_parameters(factor: Callable[[Any, Any], float], why: str | None) -> None:
    expected, _ = stepped(factor, compiled=False)
    actual, optimizer = stepped(factor, compiled=True)
    for own, eager in zip(actual, expected, strict=True):
        assert (own is None) == (eager is None)
        torch.testing.assert_close(own, eager)
    compiled = CompiledOptimizer.of(optimizer)
    assert (compiled.compilations > 0) == (why is None)
    assert all(why is not None and reason.startswith(why) for reason in compiled.reasons)
    assert bool(compiled.reasons) == (why is not None)


def test_a_parameter_may_be_frozen_later() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = Asking([parameter], by_property)
    fxamp.compile_optimizer(optimizer, lowering="aot_eager")
    for requires_grad, value in (True, -0.5), (False, -2.5), (True, -3.0):
        parameter.requires_grad_(requires_grad)
        parameter.grad = torch.ones(4)
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), torch.full((4,), value))
    assert CompiledOptimizer.of(optimizer).compilations == 2


class Choosing(EachParameter):
    """Descends, except for frozen parameters and at a learning rate of 0."""

    def step_one(self, parameter: Any, group: dict[str, Any]) -> None:
        if parameter.requires_grad and group["lr"] != 0:
            parameter.sub_(parameter.grad, alpha=group["lr"])


def test_a_guarded_step_may_leave_parameters_as_they_are() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3), requires_grad=False)]
    optimizer = Choosing(parameters, {"lr": 0.0})
    scaler = fxamp.GradScaler("cpu", 1.0, skip="device", step_lowering="aot_eager")
    scaler.scale(torch.zeros(()))
    for rate, value in (0.0, 0.0), (0.5, -0.5), (0.25, -0.75):
        optimizer.param_groups[0]["lr"] = rate
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(parameters[0].detach(), torch.full((3,), value))
        assert torch.equal(parameters[1], torch.zeros(3))
    assert CompiledOptimizer.of(optimizer).reasons == ()
