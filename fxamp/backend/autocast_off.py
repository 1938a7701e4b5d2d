"""Disable torch.autocast for graphs whose casts are already explicit."""

from collections.abc import Iterator
from contextlib import contextmanager

from fxamp.capture.autocast_state import autocast_state

#: A device type that autocast supports and that user tensors never have.
_UNUSED_DEVICE = "ipu"


@contextmanager
def no_autocast(device: str | None) -> Iterator[None]:
    """Disable autocast for ``device`` inside the context; None changes nothing."""
    if device is None:
        yield
        return
    with autocast_state(device, False):
        yield


@contextmanager
def compiled_without_autocast(device: str | None) -> Iterator[None]:
    """Disable autocast for ``device`` while AOTAutograd compiles, and whenever the compiled code and its backward run.

    AOTAutograd turns autocast off around a compiled graph if it was on for any device during compilation. So this
    turns it on for a device type that no tensor has.
    """
    if device is None:
        yield
        return
    with autocast_state(device, False), autocast_state(_UNUSED_DEVICE, True):
        yield
