"""Products of groups in float64 are those that torch computes in float32."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxamp.tools.inputs.wide_groups import in_float64

SHAPES = {
    "rows": ((40, 32), (4, 32, 16), True),
    "sums": ((32, 40), (40, 16), True),
    "columns": ((4, 32, 16), (16, 40), True),
    "stacks": ((4, 16, 32), (4, 32, 16), False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_groups_are_torchs_in_float64(name: str) -> None:
    """A float32 sum of 40 terms is off by up to 40 * 2^-24 of their magnitudes, and a gradient sums such sums."""
    *shapes, grouped = SHAPES[name]
    left, right = (torch.randn(shape) for shape in shapes)
    offsets = torch.tensor([8, 8, 24, 40], dtype=torch.int32) if grouped else None

    def outcome(dtype: torch.dtype) -> list[Tensor]:
        operands = [value.detach().to(dtype).requires_grad_() for value in (left, right)]
        result = F.grouped_mm(*operands, offs=offsets)
        return [result, *torch.autograd.grad(result.square().sum(), operands)]

    expected = outcome(torch.float32)
    with in_float64():
        results = outcome(torch.float64)
    for value, reference in zip(results, expected, strict=True):
        assert value.dtype is torch.float64
        torch.testing.assert_close(
            value.float(), reference, rtol=0, atol=80 * 2**-24 * float(reference.detach().abs().max())
        )
