"""The recipes of rules with ``cast = "fp8"``, ``"mxfp8"`` or ``"nvfp4"``: how each operand of a product is quantized.

A recipe is data: passes, kernels and tools read it here. Names and results are those of torchao.float8 and of torchao's
MXFP8 training. The recipes for NVFP4 are that of "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), and
variants without one of its parts. The names of recipes in AMD's older 8-bit formats end with "_fnuz".
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from fxamp.policy.model.category import Category

TENSOR, ROW = "tensor", "row"
"""Values of :attr:`Quantization.block`: one scale for the operand, or one for each row that a result sums over."""

MULTIPLE = 16
"""Every size of an operand, except the number of rows, must be a multiple of this many bytes."""

PACKED = "float4_e2m1fn_x2"
"""The dtype of two 4-bit values in one byte."""


class Recipe(StrEnum):
    """A row of :data:`RECIPES`, under the name that a rule gives."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"
    TENSORWISE_FNUZ = "tensorwise_fnuz"
    ROWWISE_FNUZ = "rowwise_fnuz"
    ROWWISE_WITH_GW_HP_FNUZ = "rowwise_with_gw_hp_fnuz"
    FLOOR = "floor"
    RCEIL = "rceil"
    RCEIL_WGRAD_WITH_HP = "rceil_wgrad_with_hp"
    PRETRAINING = "pretraining"
    PRETRAINING_WITHOUT_RHT = "pretraining_without_rht"
    PRETRAINING_WITHOUT_SR = "pretraining_without_sr"
    NEAREST = "nearest"


@dataclass(frozen=True)
class Quantization:
    """How one operand of a product is quantized.

    ``dtype``: torch's name of the dtype of its values. ``block``: :data:`TENSOR`, :data:`ROW`, or the number of values
    along the summed dimension that share a scale. ``scale_dtype``: float32; or float8_e8m0fnu, a power of two; or
    float8_e4m3fn, relative to a float32 scale of the tensor. ``scale_rounding``, for float32: "" keeps the scale that
    maps the largest magnitude to the dtype's largest value; "power_of_2" rounds it down to a power of two. For e8m0:
    "floor" divides the largest magnitude's power of two by that of the dtype's largest value, and larger values
    saturate; "rceil" is the smallest power of two with which no value saturates. ``rows``: how many rows share a
    block's scale. ``stochastic``: values are rounded to one of their two neighbours, without bias, instead of to the
    nearest. ``hadamard``: each block is first multiplied by a Hadamard matrix of its size, with fixed random signs.
    """

    dtype: str
    block: str | int
    scale_dtype: str = "float32"
    scale_rounding: str = ""
    rows: int = 1
    stochastic: bool = False
    hadamard: bool = False

    @property
    def multiple(self) -> int:
        """The summed dimension must be a multiple of this number."""
        aligned = 2 * MULTIPLE if self.dtype == PACKED else MULTIPLE
        return max(self.block, aligned) if isinstance(self.block, int) else aligned


Operands = tuple[Quantization, Quantization]

_FNUZ_DTYPES = {"float8_e4m3fn": "float8_e4m3fnuz", "float8_e5m2": "float8_e5m2fnuz"}
_ALL_E4M3 = ("float8_e4m3fn", "float8_e4m3fnuz")


@dataclass(frozen=True)
class Products:
    """The operands of the three products of a linear layer; None for a product in 16 bits.

    ``output`` multiplies input and weight, ``input_gradient`` the output's gradient and weight, ``weight_gradient`` the
    output's gradient and input.
    """

    output: Operands
    input_gradient: Operands
    weight_gradient: Operands | None

    def __iter__(self) -> Iterator[Operands | None]:
        return iter((self.output, self.input_gradient, self.weight_gradient))

    @property
    def multiple(self) -> int:
        """Both sizes of a weight must be a multiple of this number."""
        return max(operand.multiple for operands in self if operands is not None for operand in operands)

    @property
    def grouped(self) -> bool:
        """Whether grouped products support it: values in e4m3, with scales for rows or for blocks."""
        operands = [operand for operands in self if operands is not None for operand in operands]
        return all(operand.dtype in _ALL_E4M3 and operand.block != TENSOR for operand in operands)

    def in_fnuz(self) -> "Products":
        """The same in AMD's formats, without infinities and negative zero; the largest e4m3 value is 240, not 448."""

        def turned(operands: Operands) -> Operands:
            left, right = (replace(operand, dtype=_FNUZ_DTYPES[operand.dtype]) for operand in operands)
            return left, right

        of_weight = None if self.weight_gradient is None else turned(self.weight_gradient)
        return Products(turned(self.output), turned(self.input_gradient), of_weight)


_E4M3, _E5M2 = (Quantization(dtype, TENSOR) for dtype in ("float8_e4m3fn", "float8_e5m2"))
_POWER_OF_2 = Quantization("float8_e4m3fn", TENSOR, scale_rounding="power_of_2")
_ROW = Quantization("float8_e4m3fn", ROW, scale_rounding="power_of_2")
_FLOOR, _RCEIL = (Quantization("float8_e4m3fn", 32, "float8_e8m0fnu", rounding) for rounding in ("floor", "rceil"))
_NEAREST = Quantization(PACKED, 16, "float8_e4m3fn")
_SQUARE = replace(_NEAREST, rows=16)
_CHANCE = replace(_NEAREST, stochastic=True)
_NEAREST_RHT, _CHANCE_RHT = (replace(form, hadamard=True) for form in (_NEAREST, _CHANCE))

_FP8 = {
    Recipe.TENSORWISE: Products((_E4M3, _E4M3), (_E5M2, _E4M3), (_E5M2, _E4M3)),
    Recipe.ROWWISE: Products((_ROW, _ROW), (_ROW, _ROW), (_ROW, _ROW)),
    Recipe.ROWWISE_WITH_GW_HP: Products((_ROW, _ROW), (_ROW, _POWER_OF_2), None),
}

FNUZ: Mapping[str, Recipe] = MappingProxyType({recipe: Recipe(f"{recipe}_fnuz") for recipe in _FP8})
"""The recipe in AMD's fnuz formats for each recipe in the formats of other GPUs."""

RECIPES: Mapping[Recipe, Products] = MappingProxyType(
    {
        **_FP8,
        **{FNUZ[recipe]: products.in_fnuz() for recipe, products in _FP8.items()},
        Recipe.FLOOR: Products((_FLOOR, _FLOOR), (_FLOOR, _FLOOR), (_FLOOR, _FLOOR)),
        Recipe.RCEIL: Products((_RCEIL, _RCEIL), (_RCEIL, _RCEIL), (_RCEIL, _RCEIL)),
        Recipe.RCEIL_WGRAD_WITH_HP: Products((_RCEIL, _RCEIL), (_RCEIL, _RCEIL), None),
        Recipe.PRETRAINING: Products((_NEAREST, _SQUARE), (_CHANCE, _SQUARE), (_CHANCE_RHT, _NEAREST_RHT)),
        Recipe.PRETRAINING_WITHOUT_RHT: Products((_NEAREST, _SQUARE), (_CHANCE, _SQUARE), (_CHANCE, _NEAREST)),
        Recipe.PRETRAINING_WITHOUT_SR: Products((_NEAREST, _SQUARE), (_NEAREST, _SQUARE), (_NEAREST_RHT, _NEAREST_RHT)),
        Recipe.NEAREST: Products((_NEAREST, _NEAREST), (_NEAREST, _NEAREST), (_NEAREST, _NEAREST)),
    }
)

RECIPES_OF: Mapping[Category, tuple[Recipe, ...]] = MappingProxyType(
    {
        Category.FP8: (*_FP8, *FNUZ.values()),
        Category.MXFP8: (Recipe.FLOOR, Recipe.RCEIL, Recipe.RCEIL_WGRAD_WITH_HP),
        Category.NVFP4: (
            Recipe.PRETRAINING,
            Recipe.PRETRAINING_WITHOUT_RHT,
            Recipe.PRETRAINING_WITHOUT_SR,
            Recipe.NEAREST,
        ),
    }
)
"""The recipes that rules with a cast may name; other casts have none."""


_UNSUPPORTED = {
    "mxfp8": "MXFP8, one scale for 32 values, is cast = 'mxfp8'",
    "nvfp4": "NVFP4, values of 4 bits, is cast = 'nvfp4'",
    "delayed": "delayed scaling, by the values of earlier steps, is not supported",
    "allgather": "an fp8 all-gather of FSDP2 is not supported",
}


def unsupported(name: str) -> str:
    """Return a message if ``name`` names a recipe that fxamp does not support under that name; else ""."""
    letters = "".join(filter(str.isalnum, name)).lower()
    return next((message for word, message in _UNSUPPORTED.items() if word in letters), "")
