"""Devices: copy small tensors between them, make one current, find out what one can do.

A copy between an accelerator and the CPU may still be in progress when the call that started it returns. An accelerator
orders the copies into its memory with its other work, so nothing needs to wait for them. The CPU does not: it could
read or overwrite memory before a copy into it arrives. So a copy to the CPU waits.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fxamp.devices import KINDS


def moved(tensor: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """Return the tensor on ``device``, ready to be used there; waits only for a copy to the CPU.

    ``copy``: return a copy even if the tensor is there already.
    """
    if tensor.device == device and not copy:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu", copy=copy)


def copy_across_(target: Tensor, source: Tensor) -> None:
    """Copy ``source`` into ``target`` on another device or the same one; waits only if ``target`` is on the CPU."""
    target.copy_(source, non_blocking=target.device.type != "cpu")


def known(flags: Tensor) -> bool | None:
    """Return whether one of ``flags``, 0 or 1, is set if the host knows without waiting, as on the CPU; else None."""
    # Not by ``item``, because tools that count synchronizing ops would count it.
    return bool(flags.numpy().tobytes().strip(b"\0")) if flags.is_cpu else None


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


def native_bfloat16(device: torch.device | str) -> bool:
    """Whether the device has native bfloat16 arithmetic.

    CUDA from capability 8.0, ROCm as PyTorch reports it, CPUs with avx512_bf16 or amx_bf16 (x86) or bf16 (Arm). For
    other devices :data:`fxamp.devices.KINDS` decides; a device that it does not list has none.
    """
    place = torch.device(device)
    if place.type == "cpu":
        return _cpu_bfloat16()
    if place.type == "cuda":
        return has_gpu(place) and _cuda_bfloat16(place)
    return place.type in KINDS and bool(KINDS[place.type].bfloat16)


def _cuda_bfloat16(device: torch.device) -> bool:
    with on_device(device):  # torch asks the current one
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _cpu_bfloat16() -> bool:
    supported = torch.cpu.get_capabilities()
    return any(supported.get(unit) for unit in ("avx512_bf16", "amx_bf16", "bf16"))
