"""The recipes of rules with ``cast = "fp8"``: which 8-bit dtypes a product and its backward use, and how they scale."""

from enum import StrEnum


class Recipe(StrEnum):
    """How the operands of the three products of a linear layer are scaled before they are rounded to 8 bits.

    A scale maps the largest absolute value of what it is for to the dtype's largest. The names and the numbers are
    those of torchao.float8.
    """

    TENSORWISE = "tensorwise"
    """One scale a tensor. Inputs and weights are e4m3, gradients e5m2."""
    ROWWISE = "rowwise"
    """One scale for each row or column that a product sums over, rounded down to a power of two. All are e4m3."""
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"
    """As rowwise, but the weight's gradient is a 16-bit product; for the input's the weight has one scale."""


_UNSUPPORTED = {
    "mxfp8": "MXFP8, one scale for 32 values, is not supported",
    "nvfp4": "NVFP4, values of 4 bits, is not supported",
    "delayed": "delayed scaling, by the values of earlier steps, is not supported",
    "allgather": "an fp8 all-gather of FSDP2 is not supported",
}


def unsupported(name: str) -> str:
    """Return what fxamp does not support, in words, if ``name`` asks for it; else ""."""
    letters = "".join(filter(str.isalnum, name)).lower()
    return next((message for word, message in _UNSUPPORTED.items() if word in letters), "")
