"""Clipping inside a compiled step: the arithmetic of ``torch.nn.utils.clip_grad_norm_`` on one coefficient.

The norm that ``GradScaler.clip_grad_norm_`` reads is in ``fxamp/scaler/clipping.py``.
"""

import math

import torch
from torch import Tensor

from fxamp.errors import OptionError


def require_max_norm(max_norm: float, name: str = "clip_grad_norm_: max_norm") -> None:
    """Raise OptionError unless ``max_norm`` is a non-negative number; the message calls it ``name``."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or math.isnan(max_norm) or max_norm < 0:
        raise OptionError(f"{name}={max_norm!r}: expected a non-negative number")


def coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """Return the clip coefficient: ``min(max_norm / (total_norm + 1e-6), 1)``, 0-dim float32."""
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
