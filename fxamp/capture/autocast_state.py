"""torch.autocast's state as a context, for any device: ``torch.autocast`` itself refuses those this build lacks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def ambient_autocast(device: str) -> torch.dtype | None:
    """The dtype of the autocast that is on for ``device``, None if it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@contextmanager
def autocast_state(device: str, enabled: bool, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Autocast for ``device`` is on or off inside, to ``dtype`` (None keeps the present one); as before on leaving.

    Autocast's cache of weights is off: a cast made while tracing must not be met outside of the trace.
    """
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
