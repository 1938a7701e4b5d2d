"""Step counters in float64 while a step is computed.

An eager optimizer reads its counter on the host and computes ``1 - beta ** step`` in Python's float64. On the device
the counter is a float32 tensor, and that difference loses four digits in the first steps: 1 - 0.999 is 1e-3, float32's
rounding of 0.999 is 6e-8. So 0-dim float32 tensors of the state are widened for the step, and rounded as they are kept.
"""

from typing import Any

import torch
from torch import Tensor


def widened(value: Any) -> Any:
    """A 0-dim float32 tensor in float64; anything else as it is."""
    narrow = isinstance(value, Tensor) and value.dim() == 0 and value.dtype == torch.float32
    return value.double() if narrow else value
