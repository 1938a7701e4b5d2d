"""Requests to an implementation: check and unscale the gradients of one device, or update the loss scale."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class UnscaleRequest:
    """Check gradients of one device for inf and NaN; with ``targets``, also write the unscaled gradients.

    Attributes:
        sources: the gradients, of any floating-point dtypes and shapes, on one device, without shared memory.
        targets: where to write the unscaled gradients: ``targets[i]`` has the shape, strides and device of
            ``sources[i]`` and any floating-point dtype; the sources themselves to work in place; None to only check.
        inv_scale: one float32 on the device, by which gradients are multiplied; None to only check.
        found_inf: one float32 on the device, set to 1.0 if any source holds inf or NaN, else unchanged; or None.
        flags: int32 ``[len(sources)]`` on the device, zeroed by the caller; ``flags[i]`` is set to 1 if ``sources[i]``
            holds inf or NaN; or None.
        squared_norm: one float32 on the device, zeroed by the caller; the sum of the squares of all unscaled gradients
            is added to it (for a check only: of all sources), each squared before it is rounded to its target's dtype;
            or None.
        addresses: where the sources start, if the caller has read that already; or None.
    """

    sources: Sequence[Tensor]
    targets: Sequence[Tensor] | None = None
    inv_scale: Tensor | None = None
    found_inf: Tensor | None = None
    flags: Tensor | None = None
    squared_norm: Tensor | None = None
    addresses: list[int] | None = None

    @property
    def device(self) -> torch.device:
        """The device of all its tensors."""
        return self.sources[0].device


class ScaleRule(NamedTuple):
    """How the loss scale changes.

    ``growth_factor``: usually above 1. ``backoff_factor``: usually between 0 and 1. ``growth_interval``: the number of
    good steps before the scale grows. ``min_scale``, ``max_scale``: its bounds; None for none.
    """

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float | None = None
    max_scale: float | None = None


@dataclass(eq=False)
class Tables:
    """The tables of one caller, whose gradients have the same device, dtypes, sizes and strides in every call.

    Attributes:
        launches: what :mod:`fxamp.kernels.launch` made for the last call.
        stream: the CUDA stream of that call.
    """

    launches: Any = None
    stream: int = 0
