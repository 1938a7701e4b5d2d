"""The direct entry points: check gradients, or check and unscale them in place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fxamp.errors import OptionError
from fxamp.kernels.dispatch import perform
from fxamp.kernels.gradient_request import Tables, UnscaleRequest
from fxamp.kernels.per_device import perform_everywhere


@torch.no_grad()
def check_unscale_(
    grads: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    flags: Tensor | None = None,
    squared_norm: Tensor | None = None,
) -> None:
    """Check gradients for inf and NaN, then multiply each by ``inv_scale``, in place and without a host sync.

    Equal to ``torch._amp_foreach_non_finite_check_and_unscale_`` bit for bit, except for the payload of NaNs: the check
    comes first; the product is computed in float32 (for a float64 gradient in float64) and rounded once.

    Args:
        grads: dense gradients of any floating-point dtypes, shapes and devices, without shared memory; may be empty.
        inv_scale: one float32, 1 / scale.
        found_inf: one float32 on the device of ``inv_scale``; set to 1.0 if any gradient holds inf or NaN, otherwise
            unchanged.
        flags: int32 ``[len(grads)]`` on that device; set to 1 for each gradient that holds inf or NaN, 0 for others.
        squared_norm: one float32 on that device; set to the sum of squares of all unscaled gradients, each squared
            before it is rounded to its dtype. It overflows above a norm of 1.8e19, so it does not replace the check.

    Raises:
        OptionError: ``inv_scale`` or a result has the wrong dtype, size or device.
    """
    _expect("inv_scale", inv_scale, torch.float32, 1, found_inf.device)
    work = UnscaleRequest(grads, grads, inv_scale, found_inf, flags, squared_norm)
    _clear(grads, found_inf, flags, squared_norm)
    perform_everywhere(work, found_inf.device, keep=True)


@torch.no_grad()
def check_(
    grads: Sequence[Tensor],
    found_inf: Tensor | None,
    flags: Tensor | None = None,
    squared_norm: Tensor | None = None,
    tables: Tables | None = None,
    addresses: list[int] | None = None,
) -> None:
    """Check gradients for inf and NaN without changing them.

    Arguments and errors are those of :func:`check_unscale_`, with these differences. ``squared_norm`` is the sum of
    squares of the gradients as they are; with ``found_inf=None`` it is the only result. ``tables``: the caller's cache,
    for gradients on one device whose dtypes, sizes and strides are the same in every call. ``addresses``: the
    gradients' data pointers, if the caller has read them already.
    """
    work = UnscaleRequest(grads, found_inf=found_inf, flags=flags, squared_norm=squared_norm, addresses=addresses)
    home = _clear(grads, found_inf, flags, squared_norm)
    if tables is None:
        perform_everywhere(work, home, keep=True)
    else:
        perform(work, tables)


def _clear(
    grads: Sequence[Tensor], found_inf: Tensor | None, flags: Tensor | None, squared_norm: Tensor | None
) -> torch.device:
    """Check the result tensors, and zero those that do not accumulate over calls; return their device."""
    home = next(result.device for result in (found_inf, squared_norm) if result is not None)
    if found_inf is not None:
        _expect("found_inf", found_inf, torch.float32, 1, home)
    if flags is not None:
        _expect("flags", flags, torch.int32, len(grads), home)
        flags.zero_()
    if squared_norm is not None:
        _expect("squared_norm", squared_norm, torch.float32, 1, home)
        squared_norm.zero_()
    return home


def _expect(name: str, tensor: Tensor, dtype: torch.dtype, numel: int, device: torch.device) -> None:
    if (tensor.dtype, tensor.numel(), tensor.device) == (dtype, numel, device) and tensor.is_contiguous():
        return
    raise OptionError(
        f"{name}: expected {numel} contiguous element(s) of {dtype} on {device}, "
        f"got {tensor.numel()} of {tensor.dtype} on {tensor.device}"
    )
