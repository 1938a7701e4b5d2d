"""Where fxamp does otherwise than autocast in a call of a public function: each with its reason, and never narrower."""

INSIDE_KERNELS = "autocast reaches the products inside of this op's kernel; fxamp computes it in float32"
SOME_SIZES = "the 16-bit kernel exists for some inputs only (a matrix without elements, one norm); fxamp takes float32"
LOSES_DIGITS = "the 16-bit kernel gives wrong or infinite results on some devices; fxamp takes float32"
NO_BACKWARD = "the op's backward has no 16-bit kernel, so autocast cannot train with it; fxamp takes float32"
ABSENT_DEVICES = ("cuda", "xpu", "mps", "mtia")

ACCEPTED = {
    "histc": SOME_SIZES,
    "linalg.det": SOME_SIZES,
    "linalg.pinv": INSIDE_KERNELS,
    "linalg.pinv (hermitian)": INSIDE_KERNELS,
    "linalg.svd": SOME_SIZES,
    "matrix_exp": LOSES_DIGITS,
    "nn.functional.bilinear": INSIDE_KERNELS,
    "nn.functional.pdist": SOME_SIZES,
    "pca_lowrank": SOME_SIZES,
    "special.i1": NO_BACKWARD,
    "special.i1e": NO_BACKWARD,
    "svd": SOME_SIZES,
    "svd_lowrank": SOME_SIZES,
}
"""Functions whose results are wider than autocast's, or equal in dtype and more precise, in some mixture."""

UNTRACED = {
    "masked.cumprod": ABSENT_DEVICES,
    "masked.cumsum": ABSENT_DEVICES,
}
"""Functions that fill a tensor of their own: on these devices, tracing that needs a torch built for the device."""
