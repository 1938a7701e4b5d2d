"""drop-copies and share-equal: what is written, that values stay, and when nothing is to be done."""

from collections.abc import Callable

import pytest
import torch
from support.checks.bench_graph import assert_unchanged, golden_pass, traced_step
from support.checks.equality import assert_equal
from torch import Tensor
from torch.fx import GraphModule

from fxamp.passes.base import Context, Pass
from fxamp.passes.step.drop_copies import DropCopies
from fxamp.passes.step.share_equal import ShareEqual

aten = torch.ops.aten
PASSES = (DropCopies(), ShareEqual())


def stepping(parameter: Tensor, gradient: Tensor, rate: Tensor) -> None:
    """Copies of both kinds, one of which changes the dtype, and a rate that is computed twice."""
    own = aten.clone.default(parameter)
    new = own - gradient * (1 - rate) - own * (1 - rate)
    copy = aten.copy.default(parameter, new)
    rounded = aten.copy.default(parameter, gradient.double())
    parameter.copy_(copy + rounded)


def tidy(parameter: Tensor, gradient: Tensor, rate: Tensor) -> None:
    """Nothing twice, no copies; writes that look alike are two writes all the same."""
    parameter.copy_(parameter - gradient * rate)
    gradient.copy_(rate)


def traced(function: Callable[..., None]) -> tuple[GraphModule, Context]:
    return traced_step(function, torch.empty(3), torch.empty(3), torch.empty(()))


@pytest.mark.parametrize("step", PASSES, ids=lambda p: p.name)
def test_what_is_written_and_that_values_stay(step: Pass) -> None:
    gm, context = traced(stepping)
    broken = "copies are left" if isinstance(step, DropCopies) else ""
    assert golden_pass(f"passes/{step.name}", gm, context, step, broken).modified > 0
    actual, expected = ([torch.tensor([1.0, 2.0, 3.0]), torch.ones(3), torch.tensor(0.25)] for _ in range(2))
    gm(*actual)
    stepping(*expected)
    assert torch.equal(actual[0], expected[0]) and not torch.equal(actual[0], torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("step", PASSES, ids=lambda p: p.name)
def test_a_tidy_graph_stays_as_it_is(step: Pass) -> None:
    assert_unchanged(*traced(tidy), step)


def remembering(parameter: Tensor, previous: Tensor, rate: Tensor) -> None:
    """Of each input, a copy that is computed with, and one that is written to another input, one of them as a view."""
    new = aten.clone.default(parameter) * aten.clone.default(rate)
    old, first = aten.clone.default(parameter), aten.clone.default(previous)
    remembered = aten.copy.default(previous, aten.clone.default(old).view(3))
    parameter.copy_(new)
    previous.copy_(remembered)
    rate.copy_(first[0])


def test_a_copy_that_holds_an_old_value_stays() -> None:
    gm, context = traced(remembering)
    record = golden_pass("passes/drop-copies-of-old-values", gm, context, DropCopies(), "copies are left")
    assert record.modified > 0
    actual, expected = ([torch.tensor([1.0, 2.0, 3.0]), torch.ones(3), torch.tensor(0.25)] for _ in range(2))
    gm(*actual)
    remembering(*expected)
    assert_equal(actual, expected)


def transposing(parameter: Tensor, gradient: Tensor, rate: Tensor) -> None:
    """The copy lets the matrix be viewed as a row."""
    row = aten.clone.default(gradient.view(3, 1).expand(3, 3).t(), memory_format=torch.contiguous_format).view(9)
    parameter.copy_(row[:3])


def test_a_copy_that_lays_out_anew_stays() -> None:
    gm, context = traced(transposing)
    assert_unchanged(gm, context, DropCopies())
    inputs = [torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), torch.tensor(0.0)]
    gm(*inputs)
    assert inputs[0].tolist() == [1.0, 2.0, 3.0]
