"""Optimizers that count their steps in ``param_groups``, as most do that are not torch's: ``group["step"] += 1``."""

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.checks.exhaustive import exhaustive
from support.programs.written_steps import LOWERINGS
from torch import Tensor, nn

import fxamp
from fxamp.kernels import Implementation, forced
from fxamp.optim import CompiledOptimizer
from fxamp.optim.reading.layout import optimized_parameters

Group = dict[str, Any]
Rate = Callable[[Group], Any]
"""What a group's step multiplies gradients by; it also counts."""


def corrected(group: Group) -> Any:
    """Adam's correction of the bias."""
    group["step"] += 1
    return group["lr"] / (1 - 0.9 ** group["step"])


def corrected_by_math(group: Group) -> Any:
    group["step"] += 1
    return group["lr"] * math.sqrt(1 - math.pow(0.99, group["step"])) / (1 - 0.9 ** group["step"])


def counted_after(group: Group) -> Any:
    rate = group["lr"] * (group["step"] + 1) ** -0.5
    group["step"] += 1
    return rate


def warmed_up(group: Group) -> Any:
    """Another formula after some steps."""
    group["step"] += 1
    return group["lr"] * group["step"] / 3 if group["step"] < 3 else group["lr"]


def every_second(group: Group) -> Any:
    group["step"] += 1
    return group["lr"] if group["step"] % 2 else 0.5 * group["lr"]


def counted_in_a_float(group: Group) -> Any:
    group["k"] = group.get("k", 0.0) + 1.0
    return group["lr"] / group["k"]


class Counting(torch.optim.Optimizer):
    """SGD with momentum at a rate that depends on the number of steps."""

    def __init__(self, parameters: Any, rate: Rate) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._rate = rate

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group.setdefault("step", 0)
            rate = self._rate(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.mul_(0.5).add_(parameter.grad)
                    parameter.sub_(mean * rate)


def counting(rate: Rate, lowering: str | None) -> Counting:
    generator = torch.Generator().manual_seed(0)
    shapes = ((5,), (3, 2), ())
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = Counting([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.2}], rate)
    if lowering is not None:
        fxamp.compile_optimizer(optimizer, lowering="aot_eager" if lowering == "aot_eager" else "inductor")
    return optimizer


def stepped(optimizer: Counting, steps: int, lowering: str | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    with forced(Implementation.INTERPRETER) if lowering == "interpreter" else nullcontext():
        for _ in range(steps):
            for parameter in optimized_parameters(optimizer):
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    return [parameter.detach() for parameter in optimized_parameters(optimizer)]


@pytest.mark.parametrize("lowering", exhaustive(LOWERINGS, always=["aot_eager"]))
@pytest.mark.parametrize(
    "rate, programs",
    [
        (corrected, 1),
        (corrected_by_math, 1),
        (counted_after, 1),
        (warmed_up, 2),
        (every_second, 2),
        (counted_in_a_float, 1),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_compiled_step_counts_as_its_own_code_does(rate: Rate, programs: int, lowering: str) -> None:
    own, compiled = counting(rate, None), counting(rate, lowering)
    torch.testing.assert_close(stepped(compiled, 6, lowering), stepped(own, 6))
    settings = [[repr([*group.items()][1:]) for group in one.param_groups] for one in (own, compiled)]  # types too
    assert settings[0] == settings[1]
    record = CompiledOptimizer.of(compiled)
    assert record.reasons == () and record.compilations == programs


def test_the_host_may_set_the_counter() -> None:
    own, compiled = counting(corrected, None), counting(corrected, "aot_eager")
    for optimizer in (own, compiled):
        stepped(optimizer, 3)
        optimizer.param_groups[0]["step"] = 0
    torch.testing.assert_close(stepped(compiled, 3), stepped(own, 3))
    assert [group["step"] for group in compiled.param_groups] == [3, 6]
    assert CompiledOptimizer.of(compiled).compilations == 1


@pytest.mark.parametrize("skip", ["host", "device"])
def test_a_skipped_step_does_not_count(skip: Any, caplog: pytest.LogCaptureFixture) -> None:
    compiled = counting(corrected, "aot_eager")
    stepped(compiled, 3)
    scaler = fxamp.GradScaler("cpu", init_scale=4.0, skip=skip, step_lowering="aot_eager")
    for factor in (1.0, float("inf"), 1.0):
        compiled.zero_grad()
        scaler.scale(torch.stack([p.sum() for p in optimized_parameters(compiled)]).sum() * factor).backward()
        scaler.step(compiled)
        scaler.update()
    assert [group["step"] for group in compiled.param_groups] == [5, 5]
    assert ("on the host, which does not know if it is skipped" in caplog.text) == (skip == "device")


def by_two(group: Group) -> Any:
    group["step"] += 2
    return group["lr"] / group["step"]


def looked_up(group: Group) -> Any:
    group["step"] += 1
    return group["lr"] * [0.1, 0.3, 0.2][int(group["step"]) % 3]


def sine(group: Group) -> Any:
    group["step"] += 1
    return group["lr"] * math.sin(group["step"])


def floored(group: Group) -> Any:
    group["step"] += 1
    return group["lr"] / (group["step"] // 2 + 1)


def other_each_time(group: Group) -> Any:
    group["step"] += 1
    steps = sum(group["step"] > limit for limit in range(20))
    return group["lr"] / steps


@pytest.mark.parametrize(
    "rate, lowering, why",
    [
        (by_two, "aot_eager", "its step replaces 'step'"),
        (looked_up, "aot_eager", "its step changes with the count step"),
        (sine, "aot_eager", "its step changes with the count step"),
        (floored, "inductor", "what it computes from the count step"),
        (other_each_time, "aot_eager", "its step changes with the count step"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_uses_of_numbers_run_uncompiled(
    rate: Rate, lowering: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="fxamp"):
        torch.testing.assert_close(stepped(counting(rate, lowering), 9), stepped(counting(rate, None), 9))
    assert why in caplog.text
