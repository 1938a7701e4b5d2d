"""Numbers that a program computes with tensors and that are known while its graph is captured."""

from collections.abc import Callable

import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once
from torch import Tensor


def a_quotient_as_size(h: Tensor) -> Tensor:
    return h.view(torch.div(h.size(0), 2, rounding_mode="trunc"), 2, -1)


def a_sum_as_size(h: Tensor) -> Tensor:
    return h.narrow(0, 0, torch.add(1, 1))  # type: ignore[call-overload]


def a_size_twice(h: Tensor) -> Tensor:
    rows = torch.div(h.size(0), 2, rounding_mode="floor")
    return h.view(rows, 2, -1)[:, :1].reshape(rows, -1)


@each_once("program, dynamic", [a_quotient_as_size, a_sum_as_size, a_size_twice], [False, True])
def test_autocast_s_numbers(program: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    """Longformer's chunks: Dynamo gives the size as a tensor, and what reads its number has no tensor as its value."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        return program(x @ w).tanh()

    x, weights = torch.randn(4, 8), [torch.randn(8, 8, requires_grad=True)]
    weights.append(weights[0].detach().clone().requires_grad_())
    options = {"policy": "auto", "lowering": "aot_eager"}
    for function, w in zip(
        (run, torch.compile(run, backend="fxamp", options=options, dynamic=dynamic)), weights, strict=True
    ):
        with torch.autocast("cpu", torch.bfloat16):
            result = function(x, w)
        result.float().square().sum().backward()
    assert weights[0].grad is not None
    assert_equal(weights[0].grad, weights[1].grad)
