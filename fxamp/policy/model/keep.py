"""The forms in which a value is stored between forward and backward: the values of ``keep``."""

from enum import StrEnum

KEPT = "kept"
"""The region of rules on what the forward keeps for the backward."""

RESULT = "result"
"""The argument name under which conditions test the stored value itself."""

BLOCK = 128
"""The default number of elements that share a scale."""

SMALLEST_BLOCK = 16


class Keep(StrEnum):
    """The form in which a value is stored for the backward. The forward computes with the original value."""

    INT8 = "int8"
    """8-bit integers and a 16-bit scale for each block; infinities and NaN survive."""
    FLOAT8_E4M3FN = "float8_e4m3fn"
    """8-bit floats with 3 bits of mantissa and a scale for each block; infinities and NaN survive."""
    FLOAT8_E5M2 = "float8_e5m2"
    """8-bit floats with 2 bits of mantissa and a scale for each block; infinities and NaN survive."""
    BFLOAT16 = "bfloat16"
    """Rounded to bfloat16, if it is wider."""
    FLOAT16 = "float16"
    """Rounded to float16, if it is wider; what exceeds its range becomes infinite."""
    HOST = "host"
    """In the host's memory, bit for bit: copied there by the forward, and back by the backward."""
    RECOMPUTE = "recompute"
    """Not stored: the backward recomputes it."""
    AS_IS = "as-is"
    """As the forward computed it."""


EIGHT_BITS = (Keep.INT8, Keep.FLOAT8_E4M3FN, Keep.FLOAT8_E5M2)
"""The forms with a scale for each block."""

_RANDOM = """
    alpha_dropout bernoulli dropout feature_alpha_dropout feature_dropout multinomial native_dropout normal poisson rand
    rand_like randint randint_like randn randn_like randperm rrelu rrelu_with_noise
"""

RANDOM = frozenset(f"aten::{name}" for name in _RANDOM.split())
"""Ops that draw random numbers; recomputed, they would draw different ones."""
