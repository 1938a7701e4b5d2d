"""A size that depends on values and that Dynamo takes for a constant is asserted when the graph runs."""

import pytest
import torch
from support.oracles.like_autocast import compile_with
from torch import Tensor
from torch.nn import functional as F


def four_rows(x: Tensor, w: Tensor) -> Tensor:
    """The rows that a mask selects, of which there must be four."""
    rows = torch.where(x[:, 0] > 0)[0]
    h = F.linear(x[rows], w)
    torch._check(rows.shape[0] == 4)
    return h.tanh() + torch.zeros(h.shape)


@pytest.mark.parametrize("policy", ["cpu-bfloat16", "auto"])
def test_another_size_raises(policy: str) -> None:
    x, w = torch.ones(4, 8), torch.ones(8, 8)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = compile_with(four_rows, "eager", policy=policy)
        with torch.autocast("cpu", torch.bfloat16):
            expected = four_rows(x, w)
        with torch.autocast("cpu", torch.bfloat16, enabled=policy == "auto"):
            assert torch.equal(compiled(x, w), expected)
            for rows in (0, 3):
                fewer = torch.where(torch.arange(4)[:, None] < rows, x, -x)
                with pytest.raises(RuntimeError, match="Runtime assertion failed for expression u0"):
                    compiled(fewer, w)
