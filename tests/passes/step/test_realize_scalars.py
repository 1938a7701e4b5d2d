"""realize-scalars: powers of counters are raised once a step, in a buffer of their own."""

import re

import pytest
import torch
from support.checks.bench_graph import assert_unchanged, golden_pass, traced_step
from support.oracles.guarded_runs import SCENARIOS, Training, on_device, parts_of
from support.programs.every_optimizer import OPTIMIZERS
from torch import Tensor

from fxamp.optim import CompiledOptimizer
from fxamp.optim.programs.kind_step import KindStep
from fxamp.passes.step.realize_scalars import RealizeScalars


def corrected(x: Tensor, step: Tensor) -> Tensor:
    """One power that two larger ops read, and one number without a power."""
    bias = (1 - 0.9**step).float()
    return x / bias + x * bias + x * (step + 1).float()


def uncorrected(x: Tensor, step: Tensor) -> Tensor:
    """Cheap arithmetic, and powers of a tensor that has dimensions."""
    return (x * (step + 1).float()) ** 2.5


def test_what_is_written_and_that_values_stay() -> None:
    x, step = torch.randn(2, 3), torch.tensor(3.0, dtype=torch.float64)
    gm, context = traced_step(corrected, x, step)
    assert golden_pass("passes/realize-scalars", gm, context, RealizeScalars(), "not realized").modified == 1
    assert torch.equal(gm(x, step), corrected(x, step))


def test_a_graph_without_powers_stays_as_it_is() -> None:
    gm, context = traced_step(uncorrected, torch.empty(2, 3), torch.empty((), dtype=torch.float64))
    assert_unchanged(gm, context, RealizeScalars())


@pytest.mark.exhaustive
def test_no_power_is_raised_where_the_parameters_are_updated() -> None:
    """In the code that Inductor generates for AdamW, no loop over a parameter raises one, vectorised or not."""
    training = Training(OPTIMIZERS["AdamW"], on_device("inductor")).run(SCENARIOS["clean"])
    (kind,) = parts_of(CompiledOptimizer.of(training.optimizer))
    assert isinstance(kind, KindStep) and kind.source is not None
    _before, *loops = re.split(r"\bfor\(", kind.source)
    assert loops and not any("std::pow(" in text for text in loops)
    assert kind.source.count("std::pow(") == 2
