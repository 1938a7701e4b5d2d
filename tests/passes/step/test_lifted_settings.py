"""A setting that moves, a learning rate say, is an input of every compiled step: nothing is compiled again."""

import logging
from typing import Any

import pytest
import torch
from support.checks.exhaustive import exhaustive
from support.oracles.guarded_runs import SCENARIOS, Training, compilations, on_device
from support.programs.every_optimizer import ARGUMENTS, OPTIMIZERS, Make
from support.programs.user_optimizers import Counting
from torch import Tensor, nn

from fxamp.capture import Captured
from fxamp.optim.programs.lowering import StepOptions
from fxamp.optim.programs.step_parts import best_trace
from fxamp.optim.reading.layout import Layout, read_layout
from fxamp.optim.tracing.counters_as_tensors import counters_as_tensors
from fxamp.optim.tracing.trace import Traced
from fxamp.passes.base import Context
from fxamp.passes.step.lift_scalars import LiftScalars, liftable
from fxamp.pipeline import run_passes


def foreach(name: str) -> Make:
    return lambda parameters: getattr(torch.optim, name)(parameters, **{"lr": 0.01, **ARGUMENTS[name], "foreach": True})


FOREACH = {f"{name}, foreach": foreach(name) for name in ARGUMENTS if name not in ("Adafactor", "LBFGS", "Muon")}
MAKES: dict[str, Make] = {
    **{name: OPTIMIZERS[name] for name in ARGUMENTS if name not in ("Adafactor", "LBFGS")},
    **FOREACH,
    "a user's own": Counting,
}


# Muon makes the update orthogonal in bfloat16, where a last bit is one of the update's, times the learning rate.
COARSE = {"Muon": 1e-3 * torch.finfo(torch.bfloat16).eps}


def traced_for_inductor(make: Make) -> tuple[Traced, Layout]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(2)]
    optimizer = make(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn(4, 3, generator=generator)
        optimizer.step()
    for owner, entry in counters_as_tensors(optimizer, read_layout(optimizer)).items():
        optimizer.state[owner].update(entry)
    layout = read_layout(optimizer)
    return best_trace(optimizer, layout, StepOptions()), layout


def after(traced: Traced, layout: Layout, numbers: list[Any]) -> list[Tensor]:
    tensors = [tensor.detach().clone() for tensor in layout.tensors()]
    with torch.no_grad():
        traced.module(*tensors, *numbers)
    return tensors


@pytest.mark.parametrize("name", exhaustive(MAKES, always=[*ARGUMENTS.keys() & MAKES.keys(), "a user's own"]))
def test_every_float_becomes_a_tensor_and_no_value_changes(name: str) -> None:
    """Python's floats are rounded by each op; the tensor's elements are rounded to the op's dtype before."""
    traced, layout = traced_for_inductor(MAKES[name])
    assert traced.symbols and liftable(traced.module)
    moved = [0.75 * value for value in traced.inputs(layout.floats())]
    expected = after(traced, layout, moved)
    run_passes(Captured(traced.module, traced.mode), Context(traced.mode), LiftScalars())
    got = after(traced, layout, [torch.tensor(moved, dtype=torch.float64)])
    assert any(not torch.equal(a, b) for a, b in zip(expected, layout.tensors(), strict=True))
    for a, b in zip(got, expected, strict=True):
        atol = 1e-7 + COARSE.get(name, 0.0)
        torch.testing.assert_close(a, b, rtol=4 * torch.finfo(torch.float32).eps, atol=atol)


@pytest.mark.exhaustive  # the program is the same for all learning rates, whoever compiles it
@pytest.mark.inductor
def test_a_scheduler_moves_a_step_compiled_by_inductor() -> None:
    training = Training(FOREACH["AdamW, foreach"], on_device("inductor"))
    schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)
    for step in range(4):
        training.run(SCENARIOS["clean"], steps=[step])
        schedule.step()
    assert compilations(training) == 1


class Asking(Counting):
    """Asks of its learning rate what has another answer each time."""

    def step_one(self, parameter: Any, group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad, alpha=group["lr"] if int(group["lr"] * 1e3) % 2 else 1.0)


def test_a_step_that_is_compiled_again_and_again_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(Asking, on_device())
    with caplog.at_level(logging.WARNING, logger="fxamp.optim"):
        for step in range(20):
            training.optimizer.param_groups[0]["lr"] = 0.1 + 0.0011 * step
            training.run(SCENARIOS["clean"], steps=[step])
    assert compilations(training) > 8
    (record,) = [entry for entry in caplog.records if "compiled" in entry.message]
    assert "Asking" in record.message
