"""Numbers that a branch of a cond writes or adds are constants of the captured graph; AOTAutograd takes none there."""

import pytest
import torch
from support.oracles.like_autocast import assert_like_autocast, leaf
from torch import Tensor


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["item", "data", "constant"])
def test_a_branch_with_a_number(kind: str, lowering: str) -> None:
    def branch(x: Tensor) -> Tensor:
        ones = x.new_ones(x.shape)
        if kind == "item":
            ones[0] = 3
        elif kind == "data":
            ones.data[0] = 3
        else:
            ones = ones + torch.tensor(3.0)
        return x * ones

    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(x.sum() < 1e9, branch, torch.sin, (x,)) @ w

    assert_like_autocast(program, leaf(4, 4), leaf(4, 4), lowering=lowering)
