"""What a product in fp8 and its backward round to 8 bits, and by which scales: the matrices that calibrating looks at.

It states again what :mod:`fxamp.kernels.scaled_linear` does; a test compares the two.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from fxamp.kernels.scaled_linear import E4M3, E5M2, scale_for
from fxamp.passes.forward.scale_products import operands_of
from fxamp.policy import Recipe


@dataclass(frozen=True)
class Operand:
    """A matrix that is scaled and rounded to ``dtype``.

    ``value``: the name of its node, or with ``gradient`` of the node whose gradient it is; ``transposed``: the value is
    the matrix transposed. ``what``: its role, for people. ``dim``: each vector along this dimension has a scale; None
    for one scale. ``powers``: scales are powers of two. ``backward``: only the backward needs it.
    """

    what: str
    value: str
    dtype: torch.dtype
    dim: int | None = None
    powers: bool = False
    gradient: bool = False
    backward: bool = False
    transposed: bool = False

    @property
    def words(self) -> str:
        """The operand and its scales: ``"input, with a scale for each row"``."""
        scales = "one scale" if self.dim is None else f"a scale for each {'row' if self.dim else 'column'}"
        return f"{self.what}, with {scales}"

    def scaled(self, value: Tensor) -> Tensor:
        """Return what is rounded to 8 bits of a value, ``[..., K]``, at this place: float32 ``[rows, K]``."""
        matrix = value.detach().float().reshape(-1, value.shape[-1])
        matrix = matrix.t() if self.transposed else matrix
        return matrix * scale_for(matrix, self.dtype, self.dim, self.powers)


def operands(product: Node, recipe: Recipe) -> Iterator[Operand]:
    """Yield the matrices that ``recipe`` rounds for a product: input ``[rows, K]``, weight ``[N, K]``, gradient."""
    nodes = operands_of(product)
    input, weight, result = nodes.input.name, nodes.weight.name, product.name
    flipped = not nodes.transposed
    if recipe is Recipe.TENSORWISE:
        yield Operand("input", input, E4M3)
        yield Operand("weight", weight, E4M3, transposed=flipped)
        yield Operand("gradient at the result", result, E5M2, gradient=True, backward=True)
        return
    yield Operand("input", input, E4M3, 1, powers=True)
    yield Operand("weight", weight, E4M3, 1, powers=True, transposed=flipped)
    yield Operand("gradient at the result", result, E4M3, 1, powers=True, gradient=True, backward=True)
    if recipe is Recipe.ROWWISE_WITH_GW_HP:
        yield Operand("weight", weight, E4M3, powers=True, backward=True, transposed=flipped)
        return
    yield Operand("weight", weight, E4M3, 0, powers=True, backward=True, transposed=flipped)
    yield Operand("input", input, E4M3, 0, powers=True, backward=True)
    yield Operand("gradient at the result", result, E4M3, 0, powers=True, gradient=True, backward=True)
