"""The same work as ops for compiled graphs: functional, opaque to Inductor, with flags as an output.

Inductor cannot lower an op that changes its arguments and returns a list, and traced Triton kernels need a GPU driver
while a graph is captured. A functional op needs neither, and works in forward and backward graphs under every lowering.
In a graph they are ``torch.ops.fxamp.check_unscale.default`` and so on. ``torch.library.custom_op`` would compare the
memory of all tensors at each call, which takes the host as long as the work itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fxamp.kernels.gradient_request import UnscaleRequest
from fxamp.kernels.per_device import perform_everywhere

_LIBRARY = torch.library.Library("fxamp", "FRAGMENT")  # type: ignore[no-untyped-call]
_ARGUMENTS = "(Tensor[] gradients, Tensor inv_scale, ScalarType? dtype=None)"
_LIBRARY.define(f"check_unscale{_ARGUMENTS} -> (Tensor[], Tensor)")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"check_unscale_norm{_ARGUMENTS} -> (Tensor[], Tensor, Tensor)")  # type: ignore[no-untyped-call]


@torch.library.impl(_LIBRARY, "check_unscale", "CompositeExplicitAutograd")
def check_unscale(
    gradients: Sequence[Tensor], inv_scale: Tensor, dtype: torch.dtype | None = None
) -> tuple[list[Tensor], Tensor]:
    """Check gradients for inf and NaN, and return them unscaled: multiplied by ``inv_scale``, then rounded.

    Args:
        gradients: dense gradients of any floating-point dtypes and shapes.
        inv_scale: one float32, 1 / scale.
        dtype: the dtype of the unscaled gradients; None: each keeps its own.

    Returns:
        The unscaled gradients, with the shapes of ``gradients`` (and their strides, if those have no gaps or overlaps);
        flags, int32 ``[len(gradients)]`` on the device of ``inv_scale``: 1 if a gradient holds inf or NaN, else 0.
    """
    unscaled, flags = _outputs(gradients, inv_scale, dtype)
    work = UnscaleRequest(gradients, unscaled, inv_scale, flags=flags.zero_())
    perform_everywhere(work, inv_scale.device, keep=False)
    return unscaled, flags


@torch.library.register_fake("fxamp::check_unscale", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(gradients: Sequence[Tensor], inv_scale: Tensor, dtype: torch.dtype | None = None) -> tuple[list[Tensor], Tensor]:
    return _outputs(gradients, inv_scale, dtype)


@torch.library.impl(_LIBRARY, "check_unscale_norm", "CompositeExplicitAutograd")
def check_unscale_norm(
    gradients: Sequence[Tensor], inv_scale: Tensor, dtype: torch.dtype | None = None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """As :func:`check_unscale`; the third result is the sum of squares of all unscaled gradients: 0-dim float32.

    Each is squared before it is rounded to its dtype. A sum above float32's range is inf, so flags are still needed.
    """
    unscaled, flags = _outputs(gradients, inv_scale, dtype)
    norm = _norm(inv_scale).zero_()
    work = UnscaleRequest(gradients, unscaled, inv_scale, flags=flags.zero_(), squared_norm=norm)
    perform_everywhere(work, inv_scale.device, keep=False)
    return unscaled, flags, norm


@torch.library.register_fake("fxamp::check_unscale_norm", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(
    gradients: Sequence[Tensor], inv_scale: Tensor, dtype: torch.dtype | None = None
) -> tuple[list[Tensor], Tensor, Tensor]:
    return *_outputs(gradients, inv_scale, dtype), _norm(inv_scale)


def _outputs(gradients: Sequence[Tensor], inv_scale: Tensor, dtype: torch.dtype | None) -> tuple[list[Tensor], Tensor]:
    unscaled = [torch.empty_like(gradient, dtype=dtype or gradient.dtype) for gradient in gradients]
    return unscaled, torch.empty(len(gradients), dtype=torch.int32, device=inv_scale.device)


def _norm(home: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=home.device)
