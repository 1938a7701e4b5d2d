"""A random Hadamard transform of blocks of 16 values: it spreads an outlier over its block.

The matrix is orthogonal, so a product whose operands are both transformed along the sum is the plain product. Its signs
are fixed, as in "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149): all layers, steps and ranks share
them, so nothing about it is random at run time.
"""

import torch
from torch import Tensor

SIZE = 16
_SIGNS = 0x243F
"""A set bit is a minus: the first 16 binary digits of pi's fraction."""


def transformed(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the blocks of ``matrix``, ``[rows, blocks * 16]``, times the Hadamard matrix, rounded to bfloat16.

    Operands are rounded to bfloat16, and multiplied in ``dtype``. Row-major is the transposed matrix, as a product
    whose sum runs over rows has it.
    """
    columns = matrix.t().to(torch.bfloat16).to(dtype).reshape(matrix.shape[1] // SIZE, SIZE, matrix.shape[0])
    spread = hadamard_matrix(matrix.device, dtype).t().expand(columns.shape[0], -1, -1)
    product = torch.bmm(spread, columns).to(torch.bfloat16)
    return product.reshape(matrix.shape[1], matrix.shape[0]).t()


def hadamard_matrix(device: torch.device, dtype: torch.dtype) -> Tensor:
    """``[16, 16]``, orthogonal: signs times Sylvester's matrix, over 4. Computed, for graphs copy no constant."""
    index = torch.arange(SIZE, dtype=torch.int32, device=device)
    shared = index.unsqueeze(1) & index
    for shift in (2, 1):
        shared = shared ^ shared >> shift
    minus = (shared ^ (_SIGNS >> index).unsqueeze(1)) & 1
    return ((1 - 2 * minus) * SIZE**-0.5).to(dtype)
