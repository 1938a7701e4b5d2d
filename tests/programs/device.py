"""The device that programs run on. They are drawn on a CPU, whatever it is."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_current = "cpu"


def current() -> str:
    """The device, "cpu" or "cuda"."""
    return _current


@contextmanager
def running_on(device: str) -> Iterator[None]:
    """Run programs on ``device``, in all threads."""
    global _current
    before, _current = _current, device
    try:
        yield
    finally:
        _current = before


@contextmanager
def default_device() -> Iterator[None]:
    """Make new tensors of this thread on the device, unless the code that makes them names another."""
    if _current == "cpu":
        yield
        return
    with torch.device(_current):
        yield


def moved(code: str) -> str:
    """``code``, which names a CPU, for the device."""
    return code.replace('torch.autocast("cpu"', f'torch.autocast("{_current}"').replace(
        'device_type="cpu"', f'device_type="{_current}"'
    )
