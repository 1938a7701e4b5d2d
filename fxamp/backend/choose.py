"""Select the policy for a graph, and say why."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxamp.backend.machine import resolve_here
from fxamp.backend.once import warn_once
from fxamp.backend.options import Options
from fxamp.backend.policy_file import load_here
from fxamp.backend.products import Products
from fxamp.devices import KINDS
from fxamp.errors import PolicyError
from fxamp.policy import Policy
from fxamp.torch_devices import has_gpu, on_device
from fxamp.torch_dtypes import NARROW
from fxamp.torch_private import called_by_backward

_FLOAT32 = "policy 'auto' chose float32, so nothing is cast: %s. Name a policy to cast anyway."


@dataclass(frozen=True)
class Choice:
    """A resolved policy, or None for plain float32; and the reason as text.

    ``if_it_pays``: the policy is taken only if the graph's products gain from it (:meth:`settled`).
    """

    policy: Policy | None
    why: str
    if_it_pays: bool = False

    def settled(self, found: Products) -> "Choice":
        """Return the choice for a graph with these products, and log if it is float32 in spite of some."""
        if not self.if_it_pays:
            return self
        if found.pay:
            return replace(self, why=f"{self.why}; {found}", if_it_pays=False)
        why = f"{self.why}, but {'only ' if found.calls else ''}{found}"
        if found.calls:
            few = f"{self.why}, but a graph's products are too small to gain from it (fxamp.report counts them)"
            warn_once(__name__, _FLOAT32, few)
        return Choice(None, why)


#: What Dynamo compiles inside of a backward was not traced with its forward, so nothing scales what it computes.
IN_BACKWARD = Choice(None, "autograd calls this code in a backward, where it runs as it is written")


def choose_policy(options: Options, inputs: Sequence[Any]) -> Choice:
    """Select and resolve the policy for a graph with these ``inputs``.

    "auto" selects, in this order: the device and dtype of an ambient torch.autocast; float16 if a scaler was given;
    bfloat16 if the device computes in it natively (:func:`native_bfloat16`), on a CPU only if the graph's products
    gain from it (:mod:`fxamp.backend.products`); else no policy, which is logged once. A hook, and the backward of a
    Function that no graph holds, get none, whatever the options say.
    Raises PolicyError if a named policy is for another device than the graph's tensors, or for another machine.
    """
    if called_by_backward():
        return IN_BACKWARD
    device = device_of(inputs)
    if options.policy != "auto":
        policy = options.policy
        resolved = resolve_here(policy, device) if isinstance(policy, Policy) else load_here(policy, device)
        return Choice(resolved, "named by the caller")
    return _automatic(device, options)


def _automatic(place: torch.device | None, options: Options) -> Choice:
    if place is None:
        return Choice(None, "the graph has no tensor inputs")
    device = place.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return _named(place, dtype, f"torch.autocast({device!r}, {dtype}) is active")
    if options.scaler is not None:
        return _named(place, torch.float16, "a scaler was given")
    if native_bfloat16(place):
        found = _named(place, torch.bfloat16, f"{device} computes in bfloat16 natively")
        return replace(found, if_it_pays=device == "cpu")
    why = f"{device} has no native bfloat16: float32 is faster there"
    warn_once(__name__, _FLOAT32, why)
    return Choice(None, why)


def _named(place: torch.device, dtype: torch.dtype, why: str) -> Choice:
    device = place.type
    if dtype not in NARROW:
        accepted = ", ".join(map(str, NARROW))
        raise PolicyError(f"torch.autocast({device!r}) is active with {dtype}; accepted: {accepted}")
    return Choice(resolve_here(Policy.load(f"{device}-{NARROW[dtype]}"), place), why)


def device_of(inputs: Sequence[Any]) -> torch.device | None:
    """Return the graph's device: an accelerator among its tensors', else the CPU; None without tensors."""
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor) and value.device.type != "meta"}
    return min(devices, key=lambda each: (each.type == "cpu", each.type, each.index or 0), default=None)


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
