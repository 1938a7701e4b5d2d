"""Count how often the host waits for a CUDA device, or forbid it."""

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
        with _sync_debug_mode("warn"):
            yield count
    count.value = sum(_SYNC_WARNING in str(warning.message) for warning in caught)


@contextmanager
def no_cuda_syncs() -> Iterator[None]:
    """Raise RuntimeError, torch's own, where the host waits for a CUDA device in a block; needs a CUDA device."""
    with _sync_debug_mode("error"):
        yield


@contextmanager
def _sync_debug_mode(mode: str) -> Iterator[None]:
    """Set torch's mode in a block.

    Setting it warns after it has taken effect; the mode is reset even where warnings are errors.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode(mode)
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
