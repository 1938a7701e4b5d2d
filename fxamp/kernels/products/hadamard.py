"""A random Hadamard transform of blocks of 16 values: it spreads an outlier over its block.

The matrix is orthogonal, so a product does not change if both operands are transformed along the dimension that is
summed over. The signs are fixed, as in "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149): all layers,
steps and ranks share them, so nothing is random at run time.
"""

import torch
from torch import Tensor

SIZE = 16
_SIGNS = 0x243F
"""The signs, a set bit for minus: the first 16 binary digits of pi after the point."""


def transformed(matrix: Tensor) -> Tensor:
    """Return the blocks of ``matrix``, ``[rows, blocks * 16]``, times the Hadamard matrix, in bfloat16.

    Both are rounded to bfloat16, and sums are float32. The transpose of the result is row-major, as a product that sums
    over rows needs its operands.
    """
    columns = matrix.t().to(torch.bfloat16).reshape(matrix.shape[1] // SIZE, SIZE, matrix.shape[0])
    product: Tensor = torch.ops.fxamp.spread(columns, hadamard_matrix(matrix.device))
    return product.reshape(matrix.shape[1], matrix.shape[0]).t()


def hadamard_matrix(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``[16, 16]``, orthogonal: signs times Sylvester's matrix, over 4. Computed, so that a graph holds no constant."""
    index = torch.arange(SIZE, dtype=torch.int32, device=device)
    shared = index.unsqueeze(1) & index
    for shift in (2, 1):
        shared = shared ^ shared >> shift
    minus = (shared ^ (_SIGNS >> index).unsqueeze(1)) & 1
    matrix: Tensor = (1 - 2 * minus) * SIZE**-0.5
    return matrix.to(dtype)


_LIBRARY = torch.library.Library("fxamp", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("spread(Tensor columns, Tensor matrix) -> Tensor")  # type: ignore[no-untyped-call]


@torch.library.impl(_LIBRARY, "spread", "CompositeExplicitAutograd")
def _spread(columns: Tensor, matrix: Tensor) -> Tensor:
    """``matrix.t() @ columns`` for each block; ``[blocks, 16, rows]``.

    An op, because Inductor would compute so small products element by element, or copy their operands.
    """
    if columns.device.type == "cpu":  # not all of them multiply bfloat16 with float32 sums
        return torch.bmm(matrix.t().float().expand(columns.shape[0], -1, -1), columns.float()).to(columns.dtype)
    return torch.bmm(matrix.t().expand(columns.shape[0], -1, -1), columns)
