"""MKL's products of bfloat16 matrices in float32, against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fxamp.torch_private as private

needs_mkl = pytest.mark.skipif(not private.has_wide_products(), reason="this torch contains no MKL")

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda matrix: matrix,
    "transposed": lambda matrix: matrix.t().contiguous().t(),
    "of wider rows": lambda matrix: torch.cat([matrix, matrix], 1)[:, : matrix.shape[1]],
    "any stride": lambda matrix: matrix.as_strided(matrix.shape, (1, 1) if matrix.shape[0] == 1 else matrix.stride()),
}


@needs_mkl
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(5, 7, 3), (1, 7, 3), (5, 1, 1), (0, 7, 3), (5, 0, 3), (64, 96, 80)])
@pytest.mark.parametrize("add", [False, True])
def test_sums_are_in_float32(sizes: tuple[int, int, int], layout: str, add: bool) -> None:
    rows, *columns = sizes
    left, right = (LAYOUTS[layout](torch.randn(rows, size).bfloat16()) for size in columns)
    before = torch.randn(columns) if add else torch.full(columns, torch.nan)
    total = before.clone()
    private.write_wide_product(left, right, total, add)
    product = left.double().t() @ right.double()
    torch.testing.assert_close(total.double(), before + product if add else product, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch contains no MKL")
def test_a_torch_with_mkl_has_them() -> None:
    assert private.has_wide_products()
