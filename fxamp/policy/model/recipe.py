"""The recipes of rules with ``cast = "fp8"``: the 8-bit dtypes of a product and its backward, and their scales."""

from enum import StrEnum


class Recipe(StrEnum):
    """How the operands of the three products of a linear layer are scaled before they are rounded to 8 bits.

    A scale maps the largest absolute value of its tensor, row or column to the dtype's largest value. Names and results
    are those of torchao.float8.
    """

    TENSORWISE = "tensorwise"
    """One scale per tensor. Inputs and weights are e4m3, gradients e5m2."""
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
    """Return a message if ``name`` names a recipe that fxamp does not support; else ""."""
    letters = "".join(filter(str.isalnum, name)).lower()
    return next((message for word, message in _UNSUPPORTED.items() if word in letters), "")
