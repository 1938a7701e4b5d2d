"""realize-roundings: a rounding error is computed from the value that memory holds."""

import pytest
import torch
from support.checks.bench_graph import golden_pass
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxamp.capture import Captured
from fxamp.graph import format_graph
from fxamp.optim.tracing.trace import fake_mode
from fxamp.passes.base import Context, Result
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


def ordinary(parameter: Tensor, average: Tensor, update: Tensor) -> None:
    """Decay, and an average that is read again: differences of values that no sum leads to from one to the other."""
    decayed = parameter - parameter * 0.01
    average.copy_(average + 0.1 * (update.to(average.dtype) - average))
    parameter.copy_(decayed - average)


def captured(function: object, dtype: torch.dtype = torch.bfloat16) -> tuple[Captured, Context]:
    mode = fake_mode()
    with mode:
        inputs = torch.empty(4, dtype=dtype), torch.empty(4, dtype=dtype), torch.empty(4)
        functional = torch.func.functionalize(function, remove="mutations")  # type: ignore[arg-type]
        gm = make_fx(functional)(*inputs)
    return Captured(gm, mode), Context(mode)


@pytest.mark.parametrize("function", [compensated, compensated_in_16_bits], ids=lambda function: function.__name__)
def test_what_is_read_from_its_bits_and_that_values_stay(function: object) -> None:
    graph, context = captured(function)
    name = f"passes/realize-roundings-{function.__name__}"  # type: ignore[attr-defined]
    record = golden_pass(name, graph.module, context, RealizeRoundings(), "not realized")
    assert record.modified == 1
    runs = []
    for run in (function, graph.module):
        values = torch.ones(4).bfloat16(), torch.zeros(4).bfloat16(), torch.full((4,), 1e-4)
        run(*values)  # type: ignore[operator]
        runs.append(values)
    assert all(map(torch.equal, *runs)) and runs[0][1].any()


@pytest.mark.parametrize("function, dtype", [(ordinary, torch.bfloat16), (compensated_in_16_bits, torch.float32)])
def test_other_steps_stay_as_they_are(function: object, dtype: torch.dtype) -> None:
    graph, context = captured(function, dtype)
    before = format_graph(graph.module)
    (record,) = run_passes(graph, context, RealizeRoundings())
    assert Result(record.modified, record.counts) == Result(0) and format_graph(graph.module) == before
