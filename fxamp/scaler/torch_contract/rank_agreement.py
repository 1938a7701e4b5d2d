"""All ranks agree on the overflow flag before any rank steps, so that all ranks skip together and keep equal scales.

``fxamp/optim/gradients.py`` finds the local shard of a DTensor's gradient.
"""

from collections.abc import Iterable
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fxamp.errors import OptionError
from fxamp.torch_devices import copy_across_, moved

# A string, because a torch built without distributed has no ProcessGroup.
Ranks: TypeAlias = "dist.ProcessGroup | str | None"
"""The ranks that agree: those of a process group, all ranks (``"world"``), or None: each rank decides alone."""

_DISTRIBUTED = dist.is_available()


def require_ranks(ranks: Ranks) -> None:
    """Raise OptionError if ``ranks`` is a string other than "world"."""
    if isinstance(ranks, str) and ranks != "world":
        raise OptionError(f"ranks={ranks!r}: expected 'world', a process group, or None")


def agree(found_infs: Iterable[Tensor], device: torch.device, ranks: Ranks) -> None:
    """Set this rank's flags, one 0-dim float32 tensor per device, to the maximum over all ranks. A collective call.

    Does nothing if torch.distributed is not initialised, if ``ranks`` holds only one rank, or if it does not include
    this rank. The all-reduce runs on ``device``, so the process group's backend must support it.
    """
    if ranks is None or not (_DISTRIBUTED and dist.is_initialized()):
        return
    group = None if isinstance(ranks, str) else ranks
    if dist.get_world_size(group) <= 1:
        return
    flags = list(found_infs)
    # A rank without gradients takes part too; otherwise the other ranks would wait forever.
    combined = torch.zeros((), dtype=torch.float32, device=device)
    for flag in flags:
        combined = torch.maximum(combined, moved(flag, device))
    dist.all_reduce(combined, dist.ReduceOp.MAX, group)
    for flag in flags:
        copy_across_(flag, combined)
