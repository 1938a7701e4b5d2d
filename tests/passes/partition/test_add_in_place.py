"""add-in-place on a tiny graph of sums: golden, which sums stay, equal numbers, and running twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.golden_text import assert_golden
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fxamp.graph import format_graph
from fxamp.passes.partition.add_in_place import AddInPlace
from fxamp.pipeline import run_traced
from fxamp.policy import Policy

POLICY = Policy.load("cpu-bfloat16")
OPS = torch.ops.fxamp


def operands(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def three(left: Tensor, right: Tensor) -> Tensor:
    """As a loss in three chunks sums the gradient of its weight."""
    total = OPS.wide_product(left, right)
    left = OPS.copy_after(left, [total])
    total = OPS.add_product(left, right, total)
    left = OPS.copy_after(left, [total])
    return OPS.add_product(left, right, total) * 2


def traced(program: Callable[..., Any], inputs: list[Tensor]) -> GraphModule:
    gm: GraphModule = make_fx(program, tracing_mode="fake")(*inputs)
    return gm


def test_golden_equal_and_twice_is_once() -> None:
    inputs = operands((4, 3), (4, 2))
    gm = traced(three, inputs)
    before, expected = format_graph(gm), gm(*inputs)
    run_traced(gm, POLICY, AddInPlace())
    once = format_graph(gm)
    assert_golden("passes/add-in-place", f"before\n{before}\n\nafter\n{once}")
    assert torch.equal(gm(*inputs), expected)
    run_traced(gm, POLICY, AddInPlace())
    assert format_graph(gm) == once


def of_an_input(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    result: Tensor = OPS.add_product(left, right, total)
    return result


def returned(left: Tensor, right: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    total = OPS.wide_product(left, right)
    return total, OPS.add_product(left, right, total)


def returned_as_a_view(left: Tensor, right: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    total = OPS.wide_product(left, right)
    return total.t(), OPS.add_product(left, right, total)


def read_later(left: Tensor, right: Tensor, _: Tensor) -> Tensor:
    total = OPS.wide_product(left, right)
    return OPS.add_product(left, right, total) * total


def read_later_through_a_view(left: Tensor, right: Tensor, _: Tensor) -> Tensor:
    total = OPS.wide_product(left, right)
    view = total.t()
    return OPS.add_product(left, right, total).t() * view


def its_own_operand(left: Tensor, _: Tensor, __: Tensor) -> Tensor:
    total = OPS.wide_product(left, left)
    result: Tensor = OPS.add_product(total, total, total)
    return result


def viewed_by_its_operand(left: Tensor, _: Tensor, __: Tensor) -> Tensor:
    total = OPS.wide_product(left, left)
    result: Tensor = OPS.add_product(total.t(), left[:3], total)
    return result


OTHERS = (
    of_an_input, returned, returned_as_a_view, read_later, read_later_through_a_view, its_own_operand,
    viewed_by_its_operand,
)  # fmt: skip


@pytest.mark.parametrize("program", OTHERS)
def test_what_is_read_again_is_not_written_to(program: Callable[..., Any]) -> None:
    inputs = operands((4, 3), (4, 2), (3, 2))
    gm = traced(program, inputs)
    before = format_graph(gm)
    run_traced(gm, POLICY, AddInPlace())
    assert format_graph(gm) == before
