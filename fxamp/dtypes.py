"""torch's dtypes for the names in :mod:`fxamp.targets`."""

import torch

from fxamp.targets import DTYPES, NO_FLOAT64, SCALED_DTYPES

NARROW: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES}
"""The 16-bit dtypes that a policy can cast to, with the names that policies have for them."""

HALVES = frozenset({*(getattr(torch, name) for name in SCALED_DTYPES), torch.complex32})
"""Dtypes of a range so small that gradients in them hold the scale outside of compiled graphs."""


def widest_float(device: torch.device) -> torch.dtype:
    """The widest floating dtype that ``device`` computes in: float64, or float32 where there is none."""
    return torch.float32 if device.type in NO_FLOAT64 else torch.float64
