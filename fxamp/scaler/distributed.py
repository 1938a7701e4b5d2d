"""Ranks agree on the overflow flag before any of them steps: if one skips, all skip, and all scales stay the same."""

from collections.abc import Iterable
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fxamp.errors import OptionError

# As text, because a torch built without distributed has no ProcessGroup.
Ranks: TypeAlias = "dist.ProcessGroup | str | None"
"""Who agrees: the ranks of a process group, all ranks (``"world"``), or nobody (None: each rank decides alone)."""


def require_ranks(ranks: Ranks) -> None:
    """Raise OptionError if ``ranks`` is a word other than "world"."""
    if isinstance(ranks, str) and ranks != "world":
        raise OptionError(f"ranks={ranks!r}: expected 'world', a process group, or None")


def agree(found_infs: Iterable[Tensor], device: torch.device, ranks: Ranks) -> None:
    """Set a rank's flags, one 0-dim float32 tensor per device, to the largest of all ranks' flags; all must call this.

    Does nothing where torch.distributed is not initialised, or where ``ranks`` holds one rank or does not hold this
    one. ``device`` is where the flags meet: the process group's backend must serve it.
    """
    if ranks is None or not (dist.is_available() and dist.is_initialized()):
        return
    group = None if isinstance(ranks, str) else ranks
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
