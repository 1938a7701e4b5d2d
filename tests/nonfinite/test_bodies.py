"""Option "nonfinite" where a graph holds other graphs, or is not one graph: what is in them is named too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once, exhaustive
from support.machines.lacks import needs_compiler
from support.oracles.like_autocast import compile_with
from support.programs.small_models import unchanging
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.reports.nonfinite import NonFinite

LOWERINGS = ("eager", "aot_eager")
ALL_LOWERINGS = [*LOWERINGS, pytest.param("inductor", marks=[needs_compiler, pytest.mark.exhaustive])]


def trained(program: Callable[[Tensor], Tensor], lowering: str, size: float, **options: object) -> list[NonFinite]:
    """What is found in a step without option "raise"; ``size``: all numbers of the batch."""
    model = compile_with(unchanging(program), lowering, **{"policy": "cpu-float16", "nonfinite": "log"} | options)
    model(torch.full((2, 4), size)).backward()
    return list(fxamp.report(model).nonfinite)


def branched(h: Tensor) -> Tensor:
    def large(x: Tensor) -> Tensor:
        return torch.exp(x * 3)

    def small(x: Tensor) -> Tensor:
        return torch.sqrt(x - 1) * 2

    result: Tensor = torch.cond(h.sum() > 0, large, small, (h,))
    return result.sum()


def repeated(h: Tensor) -> Tensor:
    """Both checkpoints compute the same, and nothing reads the result of the first."""
    for _ in range(2):
        loss = checkpoint(lambda: F.cross_entropy(h, torch.tensor([0, 1])), use_reentrant=False)
        result: Tensor = loss * 2
    return result


@pytest.mark.parametrize("lowering", ALL_LOWERINGS)
def test_a_checkpoint_runs_again_where_nothing_reads_its_first_result(lowering: str) -> None:
    """torch cannot partition the graph if the first result is read outside of autograd, as a measurement does."""
    assert trained(repeated, lowering, 1.0) == []


def written_without_gradients(h: Tensor) -> Tensor:
    with torch.no_grad():
        h[0] = 0
    return torch.exp(h * 3).sum()


@pytest.mark.parametrize("lowering", exhaustive(LOWERINGS, always=["aot_eager"]))
def test_a_part_may_be_written_to_under_no_grad(lowering: str) -> None:
    assert trained(written_without_gradients, lowering, 1.0) == []
    (found,) = trained(written_without_gradients, lowering, 20.0)
    assert found.op == "aten::exp.default"


def test_such_a_part_may_be_returned_by_an_eager_graph() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ w
        with torch.no_grad():
            part = h[0].mul_(2)
        return h * 1, part

    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = compile_with(program, policy="auto", nonfinite="log")(x, torch.ones(2, 2))
    compiled[0].sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((2, 2), 2.0))


@pytest.mark.parametrize("lowering", exhaustive(LOWERINGS, always=["eager"]))
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


@pytest.mark.parametrize("lowering", exhaustive(LOWERINGS, always=["aot_eager"]))
def test_values_of_unknown_sizes_are_measured(lowering: str) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (found,) = trained(chosen, lowering, 20.0)
        assert found.op == "aten::exp.default" and found.value == "inf"
        assert trained(chosen, lowering, -20.0) == []


@pytest.mark.parametrize("lowering", ALL_LOWERINGS)
def test_batches_of_other_sizes_and_parts_between_breaks_are_measured(lowering: str) -> None:
    def program(h: Tensor) -> Tensor:
        h = h * 2
        torch._dynamo.graph_break()
        return torch.exp(h).sum()

    model = compile_with(unchanging(program), lowering, policy="cpu-float16", nonfinite="log")
    for batch in (torch.ones(2, 4), torch.ones(5, 4), torch.full((7, 4), 200.0)):
        assert fxamp.report(model).nonfinite == ()
        torch._dynamo.mark_dynamic(batch, 0)
        model(batch).backward()
    (made,) = [found for found in fxamp.report(model).nonfinite if found.kind == "op"]
    assert made.op == "aten::exp.default" and made.source is not None and "torch.exp(h)" in made.source.code


@pytest.mark.parametrize("lowering", exhaustive(LOWERINGS, always=["aot_eager"]))
def test_targets_that_a_break_parts_from_their_where_are_no_alarm(lowering: str) -> None:
    """What has no gradient next to what has one is judged where it is read; alone it is judged as it is."""

    def masked(h: Tensor, read: bool = False) -> Tensor:
        targets, h = (h.detach() - 2).sqrt(), h * 1
        torch._dynamo.graph_break()
        return ((h if read else torch.where(targets.isnan(), 0, h)) * (targets if read else targets.nan_to_num())).sum()

    assert trained(masked, lowering, 1.0) == []
    found = trained(lambda h: masked(h, read=True), lowering, 1.0)
    assert [one.kind for one in found if one.region == "forward"] == ["input"]

    def broken(h: Tensor) -> Tensor:
        h = (h - 2).sqrt()
        torch._dynamo.graph_break()
        return h.sum()

    assert [found.op for found in trained(broken, lowering, 1.0) if found.kind == "op"] == ["aten::sqrt.default"]


class Grown(torch.autograd.Function):
    """Overflows in its forward, where numbers are large, or in its backward, where they are negative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        grown = torch.exp(x * 3)
        ctx.save_for_backward(x, grown)
        ctx.set_materialize_grads(False)
        return grown * 2, x > 0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, grown = ctx.saved_tensors
        root = torch.sqrt(x)
        return gradients[0] * grown * torch.where(x > -2, root, 1.0)


def grown(h: Tensor) -> Tensor:
    result, positive = Grown.apply(h + 0)  # type: ignore[no-untyped-call]
    return (result * positive).sum() + result.sum()


def grown_in_a_checkpoint(h: Tensor) -> Tensor:
    result: Tensor = checkpoint(grown, h, use_reentrant=False)
    return result


@each_once("lowering, program", ALL_LOWERINGS, [grown, grown_in_a_checkpoint])
def test_an_op_inside_of_a_function_is_named(lowering: str, program: Callable[[Tensor], Tensor]) -> None:
    assert trained(program, lowering, 1.0) == []
    (found,) = trained(program, lowering, 20.0)
    assert (found.op, found.region, found.value) == ("aten::exp.default", "forward", "inf")
    assert found.source is not None and found.source.code == "grown = torch.exp(x * 3)"
    (found,) = trained(program, lowering, -1.0)
    assert (found.kind, found.op, found.region, found.value) == ("op", "aten::sqrt.default", "backward", "nan")
    assert found.source is not None and found.source.code == "root = torch.sqrt(x)"
    assert found.forward is None and "aten::sqrt.default in the backward is the first" in found.headline
    assert 'ops = ["aten::sqrt"]' in found.advice and set(found.gradients) == {"linear.weight", "linear.bias"}


class Negated(torch.autograd.Function):
    """Nothing in its backward is measured."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def negated(h: Tensor) -> Tensor:
    result: Tensor = Negated.apply(h + 0)  # type: ignore[no-untyped-call]
    return result.sum()


class Rectified(torch.autograd.Function):
    """It writes to its input, and autograd lets it return that alone if the input is a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.relu_()
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def rectified(h: Tensor) -> Tensor:
    result: Tensor = Rectified.apply(torch.complex(h.float(), h.float()).real)  # type: ignore[no-untyped-call]
    return result.sum()


@each_once("lowering, program", LOWERINGS, [grown, negated, rectified])
def test_a_function_that_is_watched_has_the_same_gradients(lowering: str, program: Callable[[Tensor], Tensor]) -> None:
    gradients = []
    for watched in ({}, {"nonfinite": "raise"}):
        model = compile_with(unchanging(program), lowering, policy="cpu-float16", **watched)
        model(torch.linspace(0, 1, 8).view(2, 4)).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_equal(*gradients)
