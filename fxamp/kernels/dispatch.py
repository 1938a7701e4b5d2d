"""Select the implementation for a device: the Triton kernels, torch's ops for CPUs, or the reference."""

import enum
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fxamp.kernels import host, reference
from fxamp.kernels.gradient_request import Tables, UnscaleRequest

SMALLEST_CAPABILITY = (7, 0)  # the oldest CUDA capability that Triton compiles for


class Implementation(enum.Enum):
    """The available implementations."""

    REFERENCE = "reference"
    HOST = "host"
    TRITON = "triton"
    INTERPRETER = "interpreter"


_forced: Implementation | None = None


def implementation(device: torch.device) -> Implementation:
    """Return the implementation for ``device``: Triton on CUDA devices that support it, else ATen ops."""
    if _forced is not None:
        return _forced
    if device.type == "cpu":
        return Implementation.HOST
    if device.type == "cuda" and _triton_serves(device):
        return Implementation.TRITON
    return Implementation.REFERENCE


@contextmanager
def forced(chosen: Implementation) -> Iterator[None]:
    """For tests and measurements: use ``chosen`` for all work, in all threads, within the block.

    HOST and INTERPRETER accept CPU tensors only; INTERPRETER takes milliseconds for every 16,384 elements.
    """
    global _forced
    before, _forced = _forced, chosen
    try:
        yield
    finally:
        _forced = before


def perform(work: UnscaleRequest, keep: bool | Tables) -> None:
    """Do the work on its tensors' device; ``keep``: as in :func:`fxamp.kernels.launch.perform`."""
    if not work.sources:
        return
    chosen = implementation(work.device)
    if chosen in _BY_OPS:
        _BY_OPS[chosen](work)
        return
    from fxamp.kernels import launch

    left = launch.perform(work, keep, interpret=chosen is Implementation.INTERPRETER)
    reference.perform(work, left)


_BY_OPS = {Implementation.REFERENCE: reference.perform, Implementation.HOST: host.perform}


@functools.cache
def _triton_serves(device: torch.device) -> bool:
    try:
        import triton
    except ImportError:
        return False
    # With TRITON_INTERPRET every kernel is interpreted, and the interpreter cannot read GPU addresses.
    return not triton.knobs.runtime.interpret and torch.cuda.get_device_capability(device) >= SMALLEST_CAPABILITY
