"""Keep torch.autocast away from graphs whose casts are explicit already."""

from collections.abc import Iterator
from contextlib import contextmanager

from fxamp.capture.autocast_state import autocast_state

#: A device type that autocast knows and no tensor of a user lives on.
_UNUSED_DEVICE = "ipu"


@contextmanager
def no_autocast(device: str | None) -> Iterator[None]:
    """Autocast is off for ``device`` inside; for None nothing changes."""
    if device is None:
        yield
        return
    with autocast_state(device, False):
        yield


@contextmanager
def compiled_without_autocast(device: str | None) -> Iterator[None]:
    """Off for ``device`` while AOTAutograd compiles inside, and whenever what it compiled runs, its backward too.

    AOTAutograd turns autocast off around a compiled graph if it was on for any device during compilation. So it is
    on here for a device that nothing lives on.
    """
    if device is None:
        yield
        return
    with autocast_state(device, False), autocast_state(_UNUSED_DEVICE, True):
        yield
