"""torch's dtypes for the names in :mod:`fxamp.dtypes`."""

import torch

from fxamp.devices import NO_FLOAT64
from fxamp.dtypes import DTYPES, SCALED_DTYPES

NARROW: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES}
"""The 16-bit dtypes that a policy can cast to, by their names in policies."""

HALVES = frozenset({*(getattr(torch, name) for name in SCALED_DTYPES), torch.complex32})
"""Dtypes of a range so small that gradients in them are scaled outside compiled graphs."""


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest floating-point dtype that ``device`` supports: float64, or else float32."""
    return torch.float32 if device.type in NO_FLOAT64 else torch.float64
