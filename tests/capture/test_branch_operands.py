"""Branches of a cond that read one value under two names: AOTAutograd refuses operands that share memory."""

import torch
from support.checks.exhaustive import each_once
from support.oracles.like_autocast import assert_like_autocast, leaf
from torch import Tensor
from torch.nn import functional as F


@each_once("p, lowering", [0.0, 0.5], ["eager", "aot_eager"])
def test_a_value_and_its_dropout_that_drops_nothing(p: float, lowering: str) -> None:
    def program(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        h = F.dropout(x, p, training=p == 0)

        def halves(y: Tensor) -> Tensor:
            return y + F.linear(h, w) * F.linear(x, v) + x[:, :1]

        def doubles(y: Tensor) -> Tensor:
            return y + F.linear(x, w) * 2 + h[:, 1:2]

        y = F.linear(x, v)
        return torch.cond(y.sum() < 1e9, halves, doubles, (y,)) + torch.cond(y.sum() > 1e9, halves, doubles, (y,))

    assert_like_autocast(program, leaf(4, 4), leaf(4, 4), leaf(4, 4), lowering=lowering)
