"""The casts that a rule may ask for, under the names that torch.autocast itself uses."""

from enum import StrEnum


class Category(StrEnum):
    """What happens to the floating inputs of an op (source: ``CastPolicy`` in torch's ATen/autocast_mode.h).

    A tensor is *eligible* if it is floating point, not float64, and on the policy's device. In-place and ``out=`` calls
    are never cast. No category touches a tensor that is not eligible.
    """

    LOWER_PRECISION_FP = "lower_precision_fp"
    """Every eligible input becomes the policy's 16-bit dtype."""
    FP32 = "fp32"
    """Every eligible input becomes float32."""
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """Inputs stay; if the first one is eligible and the call gives no ``dtype``, ``dtype=float32`` is given."""
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    """Inputs stay; the overload with a ``dtype`` is called: float32 if the first input is eligible, else its own."""
    PROMOTE = "promote"
    """Every eligible input becomes float32 if one of them is float32; else all must have the policy's 16-bit dtype."""
    BANNED = "banned"
    """The call is refused, with the rule's advice."""
    FP8 = "fp8"
    """A product with a 2-d weight multiplies 8-bit values that are scaled by the rule's recipe, and gives the policy's
    16-bit dtype; so do the two products of its backward. Autocast has no such category."""
