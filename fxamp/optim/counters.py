"""Compute with step counters in float64.

An eager optimizer reads its counter on the host and computes ``1 - beta ** step`` in Python's float64. On the device
the counter is a float32 tensor, and the difference loses four digits in the first steps: 1 - 0.999 is 1e-3, and the
rounding error of 0.999 in float32 is 6e-8. So the step computes with 0-dim float32 state tensors in float64, and rounds
them when it stores them.
"""

from typing import Any

import torch
from torch import Tensor


def widened(value: Any) -> Any:
    """Return a 0-dim float32 tensor in float64; anything else unchanged."""
    narrow = isinstance(value, Tensor) and value.dim() == 0 and value.dtype == torch.float32
    return value.double() if narrow else value
