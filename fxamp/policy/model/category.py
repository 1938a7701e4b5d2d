"""The casts that a rule may ask for, under the names that torch.autocast itself uses."""

from enum import StrEnum


class Category(StrEnum):
    """What happens to the floating inputs of an op (source: ``CastPolicy`` in torch's ATen/autocast_mode.h).

    A tensor is *eligible* if it is floating point, not float64, and on the policy's device. In-place and ``out=`` calls
    are never cast. No category touches a tensor that is not eligible.
    """

    LOWER_PRECISION_FP = "lower_precision_fp"
    """Every eligible input is cast to the policy's 16-bit dtype."""
    FP32 = "fp32"
    """Every eligible input is cast to float32."""
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """Inputs do not change. If the first one is eligible and the call has no ``dtype``, it gets ``dtype=float32``."""
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    """Inputs do not change. The overload with a ``dtype`` gets float32 if the first one is eligible, else its dtype."""
    PROMOTE = "promote"
    """If one eligible input is float32, all are cast to float32; else all must have the policy's 16-bit dtype."""
    BANNED = "banned"
    """The call raises :class:`fxamp.errors.BannedOpError` with the rule's advice."""
    FP8 = "fp8"
    """A product with a 2-d weight multiplies 8-bit values, scaled by the rule's recipe, and returns the policy's 16-bit
    dtype. So do the two products of its backward. Autocast has no such category."""
    MXFP8 = "mxfp8"
    """As fp8, with one scale, a power of two, for every 32 values that are summed over."""
    NVFP4 = "nvfp4"
    """As fp8 with values of 4 bits (e2m1), a scale in e4m3 for every 16 of them, and a float32 scale for the tensor."""
