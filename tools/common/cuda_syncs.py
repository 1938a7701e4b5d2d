"""Count how often the host waits for a CUDA device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SYNC_WARNING = "synchronizing CUDA operation"


class Count:
    """``value`` is set when the block ends."""

    value = 0


@contextmanager
def cuda_syncs() -> Iterator[Count]:
    """Count the synchronizations that torch.cuda.set_sync_debug_mode reports in a block; needs a CUDA device."""
    count = Count()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield count
        finally:
            torch.cuda.set_sync_debug_mode("default")
    count.value = sum(_SYNC_WARNING in str(warning.message) for warning in caught)
