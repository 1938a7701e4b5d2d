"""Warn once if a policy asks for loss scaling and training runs without a scaler."""

from collections.abc import Sequence
from typing import Any

import torch

from fxamp.backend.once import warn_once
from fxamp.backend.options import Options
from fxamp.policy import Policy

_UNSCALED = (
    "policy %s has a [loss_scale], but there is no scaler, so gradients are not scaled and may underflow: pass "
    "options={'scaler': fxamp.GradScaler.from_policy(...)}, and call its scale, step and update"
)


def warn_unscaled(policy: Policy | None, options: Options, inputs: Sequence[Any]) -> None:
    """Log that the ``[loss_scale]`` of ``policy`` has no effect, if gradients will flow through the graph."""
    if policy is None or policy.loss_scale is None or not policy.loss_scale.enabled or options.scaler is not None:
        return
    trained = any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)
    if trained and torch.is_grad_enabled():
        warn_once(__name__, _UNSCALED, policy.name)
