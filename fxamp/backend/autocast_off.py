"""Keep torch.autocast away from graphs whose casts are explicit already."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: A device type that autocast knows and no tensor of a user lives on.
_UNUSED_DEVICE = "ipu"


@contextmanager
def no_autocast(device: str | None) -> Iterator[None]:
    """Autocast is off for ``device`` inside; for None nothing changes."""
    with _switched(device, False):
        yield


@contextmanager
def compiled_without_autocast(device: str | None) -> Iterator[None]:
    """Off for ``device`` while AOTAutograd compiles inside, and whenever what it compiled runs, its backward too.

    AOTAutograd turns autocast off around a compiled graph if it was on for any device during compilation. So it is
    on here for a device that nothing lives on.
    """
    with _switched(device, False), _switched(device and _UNUSED_DEVICE, True):
        yield


@contextmanager
def _switched(device: str | None, enabled: bool) -> Iterator[None]:
    if not device:
        yield
        return
    before = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, enabled)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before)
