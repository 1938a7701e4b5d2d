"""What a product in fp8, mxfp8 or nvfp4 and its backward round, and by which scales, for calibration."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from fxamp.kernels.products.quantize import prepared, scale_of, scaled
from fxamp.passes.forward.scale_products import operands_of
from fxamp.policy import RECIPES, ROW, TENSOR, Quantization, Recipe


@dataclass(frozen=True)
class Operand:
    """A matrix that is quantized in a form.

    ``value``: the name of its node, or with ``gradient`` of the node whose gradient it is; ``transposed``: the value is
    the matrix transposed. ``what``: its role, for people. ``columns``: a product sums over its columns, not its rows.
    ``backward``: only the backward needs it.
    """

    what: str
    value: str
    form: Quantization
    columns: bool = False
    gradient: bool = False
    backward: bool = False
    transposed: bool = False

    @property
    def words(self) -> str:
        """The operand and its scales: ``"input, with a scale for each row"``."""
        line = "column" if self.columns else "row"
        scales: dict[str | int, str] = {TENSOR: "one scale", ROW: f"a scale for each {line}"}
        return f"{self.what}, with {scales.get(self.form.block, f'a scale for {self.form.block} values of a {line}')}"

    def scaled(self, value: Tensor) -> Tensor:
        """Return what is rounded of a value, ``[..., K]``, at this place: float32, sums along rows.

        A weight may be ``[experts, ...]``. Rows of different experts are taken for those of one where they are summed.
        """
        turned, wide = self.transposed != self.columns, value.detach().float()
        if value.dim() == 3 and self.what == "weight":
            matrix = (wide.transpose(1, 2) if turned else wide).flatten(0, 1)
        else:
            matrix = wide.reshape(-1, value.shape[-1])
            matrix = matrix.t() if turned else matrix
        size, matrix = matrix.shape[1], prepared(matrix, self.form)
        return scaled(matrix, scale_of(matrix, self.form), self.form)[:, :size]


def operands(product: Node, recipe: Recipe) -> Iterator[Operand]:
    """Yield the matrices that ``recipe`` rounds for a product: input ``[rows, K]``, weight ``[N, K]``, gradient."""
    listed = set()
    for operand in _of_every_product(product, recipe):
        key = operand.what, operand.form, operand.columns and operand.form.block != TENSOR
        if key not in listed:
            listed.add(key)
            yield operand


def _of_every_product(product: Node, recipe: Recipe) -> Iterator[Operand]:
    nodes, products = operands_of(product), RECIPES[recipe]
    input, weight, result = nodes.input.name, nodes.weight.name, product.name
    flipped, slope = not nodes.transposed, "gradient at the result"
    left, right = products.output
    yield Operand("input", input, left)
    yield Operand("weight", weight, right, transposed=flipped)
    left, right = products.input_gradient
    yield Operand(slope, result, left, gradient=True, backward=True)
    yield Operand("weight", weight, right, columns=True, backward=True, transposed=flipped)
    if products.weight_gradient is not None:
        left, right = products.weight_gradient
        yield Operand(slope, result, left, columns=True, gradient=True, backward=True)
        yield Operand("input", input, right, columns=True, backward=True)
