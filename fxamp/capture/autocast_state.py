"""torch.autocast's state as a context, for any device; ``torch.autocast`` raises for devices missing in this build."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def ambient_autocast(device: str) -> torch.dtype | None:
    """Return the dtype of the active autocast for ``device``; None if it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@contextmanager
def autocast_state(device: str, enabled: bool, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Set autocast for ``device`` on or off, to ``dtype`` (None keeps the current one); restore it on exit.

    Autocast's weight cache is off: code outside the trace must not find casts that were made inside it. A region that an
    exception left open is closed on exit; torch would never clear its weight cache again, and eager code would read
    stale weights.
    """
    depth = _nesting()
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_cache_enabled(False)
    if dtype is not None:
        torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.set_autocast_cache_enabled(cached)
        while _nesting() > depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _nesting() -> int:
    """Return the number of autocast regions that this thread has entered and not left."""
    inside: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return inside - 1
