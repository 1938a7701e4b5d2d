"""realize-roundings: a rounding error is computed from the value that memory holds."""

from collections.abc import Callable

import pytest
import torch
from support.checks.bench_graph import assert_unchanged, golden_pass, traced_step
from torch import Tensor
from torch.fx import GraphModule

from fxamp.capture import Captured
from fxamp.passes.base import Context
from fxamp.passes.step.realize_roundings import RealizeRoundings
from fxamp.pipeline import run_passes


def compensated(parameter: Tensor, lost: Tensor, update: Tensor) -> None:
    """Kahan's sum, computed in float32 and rounded once."""
    wanted = parameter.float() + lost.float() + update
    rounded = wanted.to(parameter.dtype)
    parameter.copy_(rounded)
    lost.copy_(wanted - rounded.float())


def compensated_in_16_bits(parameter: Tensor, lost: Tensor, update: Tensor) -> None:
    wanted = lost + update.to(lost.dtype)
    new = parameter + wanted
    lost.copy_(wanted + (parameter.clone() + -new))
    parameter.copy_(new)


def selected(parameter: Tensor, lost: Tensor, update: Tensor) -> None:
    """Only some elements are updated."""
    wanted = lost + update.to(lost.dtype)
    new = torch.where(wanted > 0, parameter + wanted, parameter)
    lost.copy_(wanted + (parameter - new))
    parameter.copy_(new)


def ordinary(parameter: Tensor, average: Tensor, update: Tensor) -> None:
    """Decay, and an average that is read again: differences of values that no sum leads to from one to the other."""
    decayed = parameter - parameter * 0.01
    average.copy_(average + 0.1 * (update.to(average.dtype) - average))
    parameter.copy_(decayed - average)


def traced(function: Callable[..., None], dtype: torch.dtype = torch.bfloat16) -> tuple[GraphModule, Context]:
    functional = torch.func.functionalize(function, remove="mutations")
    return traced_step(functional, torch.empty(4, dtype=dtype), torch.empty(4, dtype=dtype), torch.empty(4))


@pytest.mark.parametrize("function", [compensated, compensated_in_16_bits], ids=lambda function: function.__name__)
def test_what_is_read_from_its_bits(function: Callable[..., None]) -> None:
    gm, context = traced(function)
    name = f"passes/realize-roundings-{function.__name__}"
    assert golden_pass(name, gm, context, RealizeRoundings(), "not realized").modified == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "function", [compensated, compensated_in_16_bits, selected], ids=lambda function: function.__name__
)
def test_values_stay(function: Callable[..., None], dtype: torch.dtype) -> None:
    gm, context = traced(function, dtype)
    (record,) = run_passes(Captured(gm, context.mode), context, RealizeRoundings())
    assert record.modified == 1
    runs = []
    for run in (function, gm):
        values = torch.ones(4, dtype=dtype), torch.zeros(4, dtype=dtype), torch.tensor([1e-4, 2e-4, -1e-4, 0.0])
        run(*values)
        runs.append(values)
    assert all(map(torch.equal, *runs)) and runs[0][1].any()


@pytest.mark.parametrize("function, dtype", [(ordinary, torch.bfloat16), (compensated_in_16_bits, torch.float32)])
def test_other_steps_stay_as_they_are(function: Callable[..., None], dtype: torch.dtype) -> None:
    assert_unchanged(*traced(function, dtype), RealizeRoundings())
