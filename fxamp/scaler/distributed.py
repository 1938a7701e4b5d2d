"""Ranks agree on the overflow flag before any of them steps: if one skips, all skip, and all scales stay the same."""

from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

Ranks = dist.ProcessGroup | Literal["world"] | None
"""Who agrees: the ranks of a process group, all ranks, or nobody (each rank decides alone)."""


def agree(found_infs: Iterable[Tensor], device: torch.device, ranks: Ranks) -> None:
    """Set a rank's flags, one 0-dim float32 tensor per device, to the largest of all ranks' flags; all must call this.

    Does nothing where torch.distributed is not initialised, or where ``ranks`` holds one rank or does not hold this
    one. ``device`` is where the flags meet: the process group's backend must serve it.
    """
    if ranks is None or not (dist.is_available() and dist.is_initialized()):
        return
    group = None if ranks == "world" else ranks
    if dist.get_world_size(group) <= 1:
        return
    flags = list(found_infs)
    # A rank without gradients takes part too: the others would wait for it for ever.
    combined = torch.zeros((), dtype=torch.float32, device=device)
    for flag in flags:
        combined = torch.maximum(combined, flag.to(device, non_blocking=True))
    dist.all_reduce(combined, dist.ReduceOp.MAX, group)
    for flag in flags:
        flag.copy_(combined, non_blocking=True)
