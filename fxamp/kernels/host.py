"""The CPU implementation: torch's foreach ops on whole lists of tensors.

The results equal the reference's bit for bit, except for the norm, which torch's op computes in float32. Gradients are
checked one by one only if the common check finds an inf or NaN; reading its flag costs no synchronization on a CPU. The
reference does the work that torch's op cannot do in one call.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fxamp.kernels import reference
from fxamp.kernels.gradient_request import UnscaleRequest
from fxamp.torch_dtypes import NARROW


def perform(work: UnscaleRequest) -> None:
    """Do the work on CPU tensors; torch raises RuntimeError for a gradient whose dtype it cannot scale."""
    if work.targets is None:
        # A sum of squares is finite only without inf and NaN, so computing the norm is also the check.
        if work.squared_norm is None or not _add_squares(work.sources, work.squared_norm):
            _report(work, _not_finite(work.sources))
    elif work.inv_scale is not None and _fits_one_call(work, work.targets, work.inv_scale):
        _unscale(work, work.targets, work.inv_scale)
    else:
        reference.perform(work)


def _fits_one_call(work: UnscaleRequest, targets: Sequence[Tensor], inv_scale: Tensor) -> bool:
    """Whether one call of torch's op, in place on copies, takes the dtypes, rounds right and keeps finite values."""
    # Read the memory directly: a CPU needs no synchronization, and tools that count synchronizing ops would count one.
    if not 0.0 < float(inv_scale.detach().numpy().reshape(-1)[0]) <= 1.0:
        return False
    pairs = {(source.dtype, target.dtype) for source, target in zip(work.sources, targets, strict=True)}
    if any(before.is_complex for before, _ in pairs):
        return False
    if any(after is not before and (before not in NARROW or after is not torch.float32) for before, after in pairs):
        return False
    return work.squared_norm is None or all(after not in NARROW for _, after in pairs)


def _unscale(work: UnscaleRequest, targets: Sequence[Tensor], inv_scale: Tensor) -> None:
    copied = [(target, source) for target, source in zip(targets, work.sources, strict=True) if target is not source]
    if copied:
        torch._foreach_copy_([target for target, _ in copied], [source for _, source in copied])
    flag = torch.zeros(1, dtype=torch.float32, device="cpu")
    torch._amp_foreach_non_finite_check_and_unscale_(list(targets), flag, inv_scale)
    if flag.numpy()[0]:
        _report(work, _not_finite(targets))
    if work.squared_norm is not None:
        _add_squares(targets, work.squared_norm)


def _report(work: UnscaleRequest, bad: Tensor) -> None:
    if work.found_inf is not None:
        work.found_inf.masked_fill_(bad.any(), 1.0)
    if work.flags is not None:
        work.flags.copy_(bad)


def _not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether each tensor holds an inf or NaN: bool ``[len(tensors)]``. NaN propagates to both extremes."""
    bad = torch.zeros(len(tensors), dtype=torch.bool, device="cpu")
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [at for at, tensor in enumerate(tensors) if tensor.dtype is dtype and tensor.numel()]
        if places:
            extremes = torch.stack([extreme for at in places for extreme in torch.aminmax(_numbers(tensors[at]))])
            bad[places] = torch.isfinite(extremes).view(-1, 2).all(dim=1).logical_not()
    return bad


def _numbers(tensor: Tensor) -> Tensor:
    """Return the real and imaginary parts of a complex tensor, ``[..., 2]``; any other tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _add_squares(tensors: Sequence[Tensor], squared_norm: Tensor) -> bool:
    """Add the sum of the squares of all elements; return whether it is finite."""
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        members = [tensor for tensor in tensors if tensor.dtype is dtype]
        norms = torch._foreach_norm(members, 2, torch.float32 if dtype in NARROW else None)
        total += torch.stack(list(norms)).double().square().sum()
    squared_norm.add_(total)
    return bool(np.isfinite(total.numpy()))
