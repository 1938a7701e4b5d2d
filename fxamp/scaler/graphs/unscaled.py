"""Warn once if training in float16 runs without a scaler in the options."""

from collections.abc import Sequence
from typing import Any

import torch

from fxamp.graph import need_gradients
from fxamp.policy import Policy
from fxamp.reports.warnings import warn_once

_UNSCALED = (
    "policy %s has a [loss_scale], but there is no scaler, so gradients are not scaled and may underflow: pass "
    "options={'scaler': fxamp.GradScaler.from_policy(...)}, and call its scale, step and update"
)
_FLOAT16 = (
    "policy %s runs in float16, and there is no scaler in the options: small gradients become zero, unless the loss is "
    "scaled elsewhere; accepted: options={'scaler': scaler} with scaler = fxamp.GradScaler(device), and calls of its "
    "scale, step and update; or a policy in bfloat16"
)


def warn_unscaled(policy: Policy | None, chosen: bool, inputs: Sequence[Any]) -> None:
    """Log that gradients are not scaled, if they will flow through the graph and the policy asks for a scale.

    It does so by its ``[loss_scale]``, or, without one, if it was named and computes in float16; under "auto" an
    existing script has a scaler of its own. ``chosen``: whether a caller named the policy.
    """
    if policy is None:
        return
    if policy.loss_scale is None:
        message = _FLOAT16 if chosen and policy.lower_precision_fp == "float16" else ""
    else:
        message = _UNSCALED if policy.loss_scale.enabled else ""
    if message and need_gradients(inputs) and torch.is_grad_enabled():
        warn_once(__name__, message, policy.name)
