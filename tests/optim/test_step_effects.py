"""Tracing a step has no effect: what the step changes besides parameters and state is as after the steps alone."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from torch import Tensor, nn

import fxamp
from fxamp.optim import CompiledOptimizer


class Averaging(torch.optim.Optimizer):
    """Descends, and averages the parameters in tensors of its own, which ``averages`` returns."""

    def __init__(self, parameters: Any, averages: Callable[["Averaging"], list[Tensor]]) -> None:
        super().__init__(parameters, {"lr": 0.5})
        (group,) = self.param_groups
        self.lists = [parameter.detach().clone() for parameter in group["params"]]
        group["dicts"] = {at: value.clone() for at, value in enumerate(self.lists)}
        self.averages = averages

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for average, parameter in zip(self.averages(self), group["params"], strict=True):
            average.mul_(0.9)
            torch._foreach_add_([average], 0.1)
            parameter.sub_(parameter.grad, alpha=group["lr"])


def in_list(optimizer: Averaging) -> list[Tensor]:
    return optimizer.lists


def in_group(optimizer: Averaging) -> list[Tensor]:
    return list(optimizer.param_groups[0]["dicts"].values())


def in_closure() -> tuple[Callable[[Averaging], list[Tensor]], list[Tensor]]:
    held = [torch.ones(3)]
    return lambda _: held, held


def trained(optimizer: torch.optim.Optimizer, how: str) -> None:
    """Three steps, uncompiled, compiled or guarded."""
    (parameter,) = optimizer.param_groups[0]["params"]
    scaler = None
    if how == "compiled":
        fxamp.compile_optimizer(optimizer, lowering="aot_eager")
    if how == "guarded":
        scaler = fxamp.GradScaler("cpu", 1.0, skip="device", step_lowering="aot_eager")
        scaler.scale(torch.zeros(()))
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("how", ["compiled", "guarded"])
@pytest.mark.parametrize("where", [in_list, in_group, in_closure])
def test_tensors_that_a_step_holds_elsewhere_are_written_once_a_step(how: str, where: Any) -> None:
    results = []
    for own in ("uncompiled", how):
        averages, _ = in_closure() if where is in_closure else (where, None)
        optimizer = Averaging([nn.Parameter(torch.zeros(3))], averages)
        trained(optimizer, own)
        results.append((optimizer.param_groups[0]["params"][0].detach(), averages(optimizer)[0]))
    for actual, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(actual, expected)
    (why,) = CompiledOptimizer.of(optimizer).reasons
    assert "writes to a tensor" in why and "average.mul_(0.9)" in why


class Noisy(torch.optim.Optimizer):
    """Descends by a factor that is drawn."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            buffer = torch.zeros(()).add_(torch.rand(()))  # a tensor of its own, which it may write to
            parameter.sub_(parameter.grad * buffer.item())


def test_tracing_draws_no_random_numbers() -> None:
    values = []
    for how in ("uncompiled", "compiled"):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.zeros(3))
        trained(Noisy([parameter], {}), how)
        values.append((parameter.detach(), torch.rand(())))
    assert_equal(*values)


class Clock:
    """Counts, in an attribute."""

    def __init__(self) -> None:
        self.time = 0

    def tick(self) -> int:
        self.time += 1
        return self.time


class Counting(torch.optim.Optimizer):
    """Descends by a tenth of what ``count`` returns."""

    def __init__(self, parameters: Any, held: Any, count: Callable[[Any], int]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.held, self.param_groups[0]["held"], self.count = held, {"inner": held}, count

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        factor = self.count(self)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] * factor)


def of_object(optimizer: Any) -> int:
    return int(optimizer.held.tick())


def of_nested_dict(optimizer: Any) -> int:
    optimizer.held["inner"]["time"] += 1
    return int(optimizer.held["inner"]["time"])


def of_group(optimizer: Any) -> int:
    entry = optimizer.param_groups[0]["held"]["inner"]
    entry["time"] = entry.get("time", 0) + 1
    return int(entry["time"])


def of_list(optimizer: Any) -> int:
    optimizer.held.append(1)
    return len(optimizer.held)


def of_set(optimizer: Any) -> int:
    optimizer.held.add(len(optimizer.held))
    return len(optimizer.held)


def of_method(optimizer: Any) -> int:
    return int(optimizer.held())


def of_iterator(optimizer: Any) -> int:
    return int(next(optimizer.held))


@pytest.mark.parametrize(
    ("count", "make"),
    [
        (of_object, Clock),
        (of_nested_dict, lambda: {"inner": {"time": 0}}),
        (of_group, dict),
        (of_list, list),
        (of_set, set),
        (of_method, lambda: Clock().tick),
        (of_iterator, lambda: itertools.count(1)),
    ],
)
def test_python_state_of_a_step_advances_once_a_step(count: Callable[[Any], int], make: Callable[[], Any]) -> None:
    held, parameter = make(), nn.Parameter(torch.zeros(3))
    optimizer = Counting([parameter], held, count)
    trained(optimizer, "compiled")
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -0.6))
    assert optimizer.held is held and optimizer.param_groups[0]["held"]["inner"] is held
    assert count(optimizer) == 4
    (why,) = CompiledOptimizer.of(optimizer).reasons
    assert "'held' holds" in why


def test_objects_that_a_step_reads_alone_are_accepted() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = Counting([parameter], [Clock(), {"inner": [2]}], lambda optimizer: optimizer.held[1]["inner"][0])
    trained(optimizer, "compiled")
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -0.6))
    assert CompiledOptimizer.of(optimizer).compilations == 1
