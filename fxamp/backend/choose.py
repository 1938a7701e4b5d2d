"""Select the policy for a graph, and say why."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from fxamp.backend.machine import resolve_here
from fxamp.backend.options import Options
from fxamp.backend.policy_file import load_here
from fxamp.backend.products import Products
from fxamp.backend.surroundings import Surroundings
from fxamp.capture.autocast_state import ambient_autocast, region_dtypes
from fxamp.devices import KINDS
from fxamp.errors import PolicyError
from fxamp.graph import source_frames
from fxamp.policy import Policy
from fxamp.reports.warnings import Example, warn_once
from fxamp.torch_devices import has_gpu, on_device
from fxamp.torch_dtypes import NARROW
from fxamp.torch_private import called_by_backward

_FLOAT32 = (
    "policy 'auto' chose float32 for a graph%s, so nothing in it is cast: %s. Name a policy to cast anyway; "
    "fxamp.report lists the policy of each graph"
)


@dataclass(frozen=True)
class Choice:
    """A resolved policy, or None for plain float32; and the reason as text.

    ``if_it_pays``: the policy is taken only if the graph's products gain from it (:meth:`settled`).
    ``under_autocast``: it follows a torch.autocast around the graph or in it. ``only_regions``: as in
    :class:`~fxamp.passes.base.CastContext`. ``surroundings``: those that it holds for; None: for any.
    """

    policy: Policy | None
    why: str
    if_it_pays: bool = False
    under_autocast: bool = False
    only_regions: torch.dtype | None = None
    surroundings: Surroundings | None = None

    def settled(self, found: Products, gm: GraphModule | None = None) -> "Choice":
        """Return the choice for the graph ``gm`` with these products, and log if it is float32 in spite of some."""
        if not self.if_it_pays:
            return self
        if found.pay:
            return replace(self, why=f"{self.why}; {found}", if_it_pays=False)
        why = f"{self.why}, but {'only ' if found.calls else ''}{found}"
        if found.calls:
            few = f"{self.why}, but a graph's products are too small to gain from it (fxamp.report counts them)"
            warn_once(__name__, _FLOAT32, _example(gm), few)
        return replace(self, policy=None, why=why, if_it_pays=False)


#: What Dynamo compiles inside of a backward was not traced with its forward, so nothing scales what it computes.
IN_BACKWARD = Choice(None, "autograd calls this code in a backward, where it runs as it is written")


def choose_policy(options: Options, inputs: Sequence[Any], gm: GraphModule | None = None) -> Choice:
    """Select and resolve the policy for the graph ``gm``, if it is known, with these ``inputs``.

    "auto" follows what the program says: the device and dtype of an ambient torch.autocast; the dtypes of the autocast
    regions in the graph, outside of which nothing is cast; no policy where the program has switched autocast off, or
    ran the model under it before and does not now. If the program says nothing, it selects float16 if a scaler was
    given and gradients are on; bfloat16 if the device computes in it natively (:func:`native_bfloat16`), on a CPU only
    if the graph's products gain from it (:mod:`fxamp.backend.products`); else no policy, which is logged once. A hook,
    and the backward of a Function that no graph holds, get none, whatever the options say.
    Raises PolicyError if a named policy is for another device than the graph's tensors, or for another machine.
    """
    if called_by_backward():
        return IN_BACKWARD
    place = device_of(inputs)
    if options.policy != "auto":
        policy = options.policy
        resolved = resolve_here(policy, place) if isinstance(policy, Policy) else load_here(policy, place)
        return Choice(resolved, "named by the caller")
    if place is None:
        return Choice(None, "the graph has no tensor inputs")
    choice = _by_autocast(place, gm)
    if choice is not None:
        return choice
    surroundings = Surroundings.now([value for value in inputs if isinstance(value, torch.nn.Parameter)])
    return replace(_by_default(place, options, surroundings, gm), surroundings=surroundings)


def _by_autocast(place: torch.device, gm: GraphModule | None) -> Choice | None:
    """Return what a torch.autocast around the graph or in it says; None if there is none."""
    device = place.type
    ambient = ambient_autocast(device)
    if ambient is not None:
        found = _named(place, ambient, f"torch.autocast({device!r}, {ambient}) is active")
        return replace(found, under_autocast=True)
    opened = [] if gm is None else list(dict.fromkeys(region_dtypes(gm, device)))
    if not opened:
        return None
    current = torch.get_autocast_dtype(device)
    first = next((dtype for dtype in opened if dtype in NARROW), current)
    why = f"torch.autocast in it: {', '.join(map(str, opened))}; nothing is cast outside"
    return replace(_named(place, first, why), under_autocast=True, only_regions=current)


def _by_default(place: torch.device, options: Options, surroundings: Surroundings, gm: GraphModule | None) -> Choice:
    device = place.type
    if surroundings.off:
        return Choice(None, "the program uses torch.autocast, and it is off here")
    if options.scaler is not None and surroundings.trains:
        return _named(place, torch.float16, "a scaler was given")
    if native_bfloat16(place):
        found = _named(place, torch.bfloat16, f"{device} computes in bfloat16 natively")
        return replace(found, if_it_pays=device == "cpu")
    why = f"{device} has no native bfloat16: float32 is faster there"
    warn_once(__name__, _FLOAT32, _example(gm), why)
    return Choice(None, why)


def _example(gm: GraphModule | None) -> Example:
    """Return where the code of a graph is, for a warning."""
    stacks = [source_frames(node) for node in gm.graph.nodes] if gm is not None else []
    frame = next((frames[-1] for frames in stacks if frames), None)
    return Example("" if frame is None else f" ({frame.file}:{frame.line})")


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
