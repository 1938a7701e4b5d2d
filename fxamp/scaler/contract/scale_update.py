"""The two ways to change the scale: growth and backoff, or a value from the user."""

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fxamp.scaler.contract.state import OptimizerRecord, ScaleBounds


def adapt_scale_(
    scale: Tensor,
    tracker: Tensor,
    records: Iterable[OptimizerRecord],
    rule: tuple[float, float, int],
    bounds: ScaleBounds,
) -> None:
    """Back off if any optimizer's flag is set; else count, and grow when the count reaches the interval. In place.

    Args:
        scale: 0-dim float32.
        tracker: 0-dim int32, consecutive updates without an overflow since the scale last changed.
        records: the checks since the last update.
        rule: growth factor, backoff factor, growth interval.
        bounds: the limits of backoff and growth.

    Raises:
        AssertionError: no optimizer's gradients were checked.
    """
    from fxamp.kernels import update_scale_

    flags = [record.found_inf(scale.device) for record in records if record.found_inf_per_device]
    if not flags:
        raise AssertionError("No inf checks were recorded prior to update.")
    update_scale_(
        scale, tracker, reduce(torch.add, flags), *rule, min_scale=bounds.min_scale, max_scale=bounds.max_scale
    )


def set_scale_(scale: Tensor, new_scale: Any, device_type: str) -> None:
    """Copy ``new_scale`` into ``scale``: a number, or a one-element tensor on a ``device_type`` device, without grad.

    Raises:
        AssertionError: ``new_scale`` is something else.
    """
    if isinstance(new_scale, (int, float)) and not isinstance(new_scale, bool):
        scale.fill_(new_scale)
        return
    usable = (
        isinstance(new_scale, Tensor)
        and new_scale.device.type == device_type
        and new_scale.numel() == 1
        and not new_scale.requires_grad
    )
    if not usable:
        given = f"{type(new_scale).__name__} {new_scale!r}"
        raise AssertionError(
            f"new_scale should be a number or a 1-element {device_type} tensor with requires_grad=False, not {given}"
        )
    scale.copy_(new_scale.reshape(()))
