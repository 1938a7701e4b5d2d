"""Option "nonfinite" where a graph holds other graphs, or is not one graph: what is in them is named too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracles.like_autocast import compile_with
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.reports.nonfinite import NonFinite

LOWERINGS = ("eager", "aot_eager")


class Net(nn.Module):
    """``program`` of a linear layer's result."""

    def __init__(self, program: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.program = nn.Linear(4, 4), program
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.linear(x))


def trained(program: Callable[[Tensor], Tensor], lowering: str, size: float, **options: object) -> list[NonFinite]:
    """What is found in a step without option "raise"; ``size``: all numbers of the batch."""
    model = compile_with(Net(program), lowering, **{"policy": "cpu-float16", "nonfinite": "log"} | options)
    model(torch.full((2, 4), size)).backward()
    return list(fxamp.report(model).nonfinite)


def branched(h: Tensor) -> Tensor:
    def large(x: Tensor) -> Tensor:
        return torch.exp(x * 3)

    def small(x: Tensor) -> Tensor:
        return torch.sqrt(x - 1) * 2

    result: Tensor = torch.cond(h.sum() > 0, large, small, (h,))
    return result.sum()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_op_in_the_branch_that_ran_is_named(lowering: str) -> None:
    assert trained(branched, lowering, 1.0) == []
    (found,) = trained(branched, lowering, 20.0)
    assert found.op == "aten::exp.default" and found.node.startswith("body_0/")
    assert found.source is not None and "torch.exp(x * 3)" in found.source.code
    (found,) = trained(branched, lowering, -1.0)
    assert found.op == "aten::sqrt.default" and found.node.startswith("body_1/")


def checkpointed(h: Tensor) -> Tensor:
    return checkpoint(lambda x: torch.where(x > 0, torch.sqrt(x * (x > 0)), 0.0), h, use_reentrant=False).sum()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_backward_of_an_op_in_a_checkpoint_is_named(lowering: str) -> None:
    (found,) = trained(checkpointed, lowering, -1.0)
    assert found.region == "backward" and found.forward is not None
    assert found.forward.target == "aten::sqrt.default"


def chosen(h: Tensor) -> Tensor:
    return torch.exp(h[h.sum(1) > 0]).sum()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_values_of_unknown_sizes_are_measured(lowering: str) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (found,) = trained(chosen, lowering, 20.0)
        assert found.op == "aten::exp.default" and found.value == "inf"
        assert trained(chosen, lowering, -20.0) == []


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_batches_of_other_sizes_and_parts_between_breaks_are_measured(lowering: str) -> None:
    def program(h: Tensor) -> Tensor:
        h = h * 2
        torch._dynamo.graph_break()
        return torch.exp(h).sum()

    model = compile_with(Net(program), lowering, policy="cpu-float16", nonfinite="log")
    for size in (2, 3, 5):
        model(torch.ones(size, 4)).backward()
    assert fxamp.report(model).nonfinite == ()
    model(torch.full((7, 4), 200.0)).backward()
    (made,) = [found for found in fxamp.report(model).nonfinite if found.kind == "op"]
    assert made.op == "aten::exp.default" and made.source is not None and "torch.exp(h)" in made.source.code


class Grown(torch.autograd.Function):
    """What overflows, with a backward that does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.exp(x * 3)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def grown(h: Tensor) -> Tensor:
    result: Tensor = Grown.apply(h)  # type: ignore[no-untyped-call]
    return result.sum()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_function_is_named_as_a_whole_and_says_so(lowering: str) -> None:
    (found,) = trained(grown, lowering, 200.0)
    assert found.op == "higher_order::autograd_function_apply" and "inside     not measured" in str(found)
