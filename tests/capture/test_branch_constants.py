"""Constants that a branch of a cond writes or adds, or that index in it: AOTAutograd takes none there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once, exhaustive
from support.oracles.like_autocast import assert_like_autocast, leaf
from torch import Tensor


class Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.tensor([1.0, 2.0, 3.0, 4.0])


def item(x: Tensor) -> Tensor:
    ones = x.new_ones(x.shape)
    ones[0] = 3
    return x * ones


def data(x: Tensor) -> Tensor:
    ones = x.new_ones(x.shape)
    ones.data[0] = 3
    return x * ones


BRANCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "item": item,
    "data": data,
    "number": lambda x: x * (x.new_ones(x.shape) + torch.tensor(3.0)),
    "values": lambda x: x * torch.tensor([1.0, 2.0, 3.0, float("inf")]).bfloat16().clamp(max=4),
    "index": lambda x: x[[2, 1, 0, 3]],
    "mask": lambda x: x.masked_fill(torch.tensor([True, False, False, True]), 0.5),
    "function": lambda x: Weighted.apply(x),
    "branch": lambda x: torch.cond(x.sum() < 1e9, lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.cos, (x,)),
}


@each_once(
    "name, lowering",
    exhaustive(BRANCHES, always=list(BRANCHES)[::2]),
    ["eager", "aot_eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.exhaustive])],
)
def test_a_branch_with_constants(name: str, lowering: str) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(x.sum() < 1e9, BRANCHES[name], torch.sin, (x,)) @ w

    assert_like_autocast(program, leaf(4, 4), leaf(4, 4), lowering=lowering)
