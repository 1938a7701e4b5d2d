"""The reference: what the kernels compute, expressed in ATen ops.

It defines correctness for the other implementations, and runs on any device, with or without Triton. In place it calls
torch's own op, except for dtypes that this op does not support: complex ones, and bfloat16 on CUDA (pytorch #127176).
In every other case it follows the rule of that op (ATen/native/AmpKernels.cpp): check for inf and NaN first, then
multiply in float32 (a float64 gradient in float64), then round once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fxamp.kernels.gradient_request import ScaleRule, UnscaleRequest
from fxamp.torch_dtypes import widest_float


def perform(work: UnscaleRequest, positions: Sequence[int] | None = None) -> None:
    """Do the work, only for the gradients at ``positions`` if they are given.

    Raises:
        RuntimeError: from torch, for a gradient whose dtype it cannot scale.
    """
    chosen = range(len(work.sources)) if positions is None else positions
    if not chosen:
        return
    bad = torch.zeros(len(chosen), dtype=torch.float32, device=work.device)
    for position, slot in zip(chosen, bad.unbind(), strict=True):
        _check_and_unscale(work, position, slot)
    if work.found_inf is not None:
        work.found_inf.masked_fill_(bad.any(), 1.0)
    if work.flags is not None and positions is None:
        work.flags.copy_(bad)
    elif work.flags is not None:
        slots = work.flags.unbind()
        torch._foreach_copy_([slots[position] for position in chosen], list(bad.unbind()))


def _check_and_unscale(work: UnscaleRequest, position: int, flag: Tensor) -> None:
    """Do the work for one gradient, and set ``flag`` (0-dim float32, holds 0.0) to 1.0 if it is not finite."""
    source = work.sources[position]
    in_place = work.targets is not None and work.targets[position] is source
    if in_place and work.squared_norm is None and not (source.is_complex() or source.dtype is torch.bfloat16):
        assert work.inv_scale is not None
        torch._amp_foreach_non_finite_check_and_unscale_([source], flag, work.inv_scale)
        return
    flag.copy_(torch.isfinite(source).all().logical_not())
    wide = source.to(torch.promote_types(source.dtype, torch.float32))
    if work.targets is not None:
        assert work.inv_scale is not None
        wide = wide * work.inv_scale.reshape(())
        work.targets[position].copy_(wide)
    if work.squared_norm is not None:
        magnitudes = wide.abs() if wide.is_complex() else wide
        work.squared_norm.add_(magnitudes.square().sum(dtype=widest_float(source.device)))


def update_scale(scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, rule: ScaleRule) -> None:
    """Grow or back off ``scale`` in place, by the rule of :func:`fxamp.kernels.update_scale_`.

    torch's op tests the tracker with ``==``; limiting the tracker to below the interval makes that a ``>=``.
    """
    interval = max(rule.growth_interval, 1)
    if not growth_tracker.is_cpu or growth_tracker.numpy().item() >= interval:  # a CPU reads without waiting
        growth_tracker.clamp_(max=interval - 1)
    torch._amp_update_scale_(scale, growth_tracker, found_inf, rule.growth_factor, rule.backoff_factor, interval)
    if rule.min_scale is not None or rule.max_scale is not None:
        scale.clamp_(rule.min_scale, rule.max_scale)
