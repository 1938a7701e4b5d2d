"""What is to be done to gradients of one device: the one argument that every implementation takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class UnscaleRequest:
    """Check gradients of one device for inf and NaN, and write their true values unless it is a check only.

    Attributes:
        sources: the gradients, of any floating dtypes and shapes, on one device, no two sharing memory.
        targets: where the true gradients go: ``targets[i]`` has the shape, the strides and the device of ``sources[i]``
            and any floating dtype; the sources themselves to work in place; None to check only.
        inv_scale: one float32 on the device, by which gradients are multiplied; None to check only.
        found_inf: one float32 on the device, set to 1.0 if any source holds inf or NaN, else left alone; or None.
        flags: int32 ``[len(sources)]`` on the device, zeroed by the caller; ``flags[i]`` becomes 1 if ``sources[i]``
            holds inf or NaN; or None.
        squared_norm: one float32 on the device, zeroed by the caller, to which the sum of the squares of all true
            gradients is added (if it is a check only: of all sources), each squared before it is rounded to its
            target's dtype; or None.
    """

    sources: Sequence[Tensor]
    targets: Sequence[Tensor] | None = None
    inv_scale: Tensor | None = None
    found_inf: Tensor | None = None
    flags: Tensor | None = None
    squared_norm: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The one device of all its tensors."""
        return self.sources[0].device
