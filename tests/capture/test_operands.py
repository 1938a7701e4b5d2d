"""Conds and loops that read one value under two names: AOTAutograd refuses operands that share memory."""

from collections.abc import Callable

import pytest
import torch
from support.checks.exhaustive import each_once, exhaustive
from support.oracles.like_autocast import assert_like_autocast, leaf
from torch import Tensor
from torch._dynamo.exc import UncapturedHigherOrderOpError
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_
from torch.nn import functional as F


def branches(h: Tensor, x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    return torch.cond(
        y.sum() < 1e9, lambda y: y * F.linear(h, w) + x[:, :1], lambda y: y + F.linear(x, w) * h[:, 1:2], (y,)
    )


def inner_branches(h: Tensor, x: Tensor, w: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return torch.cond(y.sum() < 1e9, lambda y: y * h + x, lambda y: y * x, (y,))

    return F.linear(torch.cond(x.sum() < 1e9, inner, lambda y: y + h, (x * 2,)), w)


def scanned(h: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return F.linear(scan(lambda c, y: (c + y + h[0] + x[0], c * y + x[1] * h[1]), torch.zeros(4), x * 1)[1], w)


def mapped(h: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return F.linear(map_(lambda y: y * 2 + h[0] * x[0], x * 1), w)


def looped(h: Tensor, x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        last = while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * h + x), (torch.tensor(0), x + 1))[1]
    return F.linear(last * x, w)


def require_accepted(program: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Skip the test where this torch's Dynamo refuses the program."""
    try:
        torch.compile(program, backend="eager")(*inputs)
    except UncapturedHigherOrderOpError as error:
        pytest.skip(str(error).splitlines()[2])


PROGRAMS = (branches, inner_branches, scanned, mapped, looped)


@each_once("program, p, lowering", exhaustive(PROGRAMS, always=PROGRAMS[:3]), [0.0, 0.5], ["aot_eager", "eager"])
def test_a_value_and_its_dropout_that_drops_nothing(
    program: Callable[[Tensor, Tensor, Tensor], Tensor], p: float, lowering: str
) -> None:
    def dropping(x: Tensor, w: Tensor) -> Tensor:
        x = x * 2
        return program(F.dropout(x, p, training=p == 0), x, w)

    require_accepted(dropping, leaf(4, 4), leaf(4, 4))
    assert_like_autocast(dropping, leaf(4, 4), leaf(4, 4), lowering=lowering)


def test_a_write_to_one_name_shows_under_the_other() -> None:
    """Under "eager"; AOTAutograd's trace loses it, with torch's own backend too."""

    def program(x: Tensor) -> Tensor:
        h = F.dropout(x, 0.5, training=False)
        return torch.cond(x.sum() < 1e9, lambda: h.add_(1) + x, lambda: h + x, ())

    compiled = torch.compile(program, backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": "eager"})
    x = torch.ones(4)
    with torch.no_grad():
        require_accepted(program, torch.ones(4))
        assert compiled(x).tolist() == [4.0] * 4
    assert x.tolist() == [2.0] * 4
