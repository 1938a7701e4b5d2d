"""Devices: copy small tensors from one to another, run under the one that is worked on, ask what it can do.

A copy between an accelerator and the CPU may still be under way when the call that started it returns. A device orders
the copies into its memory with its other work, so nothing waits for those. The CPU orders nothing: it would read, or
overwrite, memory into which a copy has yet to arrive. So a copy to the CPU waits.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """Return the tensor on ``device``, ready to be used there; waits only for a copy to the CPU.

    ``copy``: return a copy even if the tensor is there already.
    """
    return tensor.to(device, non_blocking=device.type != "cpu", copy=copy)


def copy_across_(target: Tensor, source: Tensor) -> None:
    """Copy ``source`` into ``target`` on another device or the same one; waits only if ``target`` is on the CPU."""
    target.copy_(source, non_blocking=target.device.type != "cpu")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current one in a block if it is a CUDA device.

    Launches, events and questions about "the current stream" refer to the current device, whichever it is.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def has_gpu(device: torch.device) -> bool:
    """Whether this machine has the CUDA device; without an index: any."""
    return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()


def converts_float8(device: torch.device) -> bool:
    """Whether Triton converts to and from float8_e4m3fn on the device: on NVIDIA GPUs from capability 8.9 on."""
    if device.type != "cuda" or torch.version.hip or not has_gpu(device):
        return True
    return torch.cuda.get_device_capability(device) >= (8, 9)
