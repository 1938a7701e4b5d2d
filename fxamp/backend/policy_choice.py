"""Select the policy for a graph, say why, and recompile the graph if its policy would no longer be chosen.

torch.compile compares options by value, so a path stays equal while its file changes. fxamp adds a guard that Dynamo
checks in each call of a graph; it recompiles if the file now decides differently, if the environment names another
policy, or if a relative path names another file because the working directory has changed.
"""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointFunction

from fxamp.backend.auto_products import Products
from fxamp.backend.options import Options
from fxamp.backend.policy_in_force import Unchanged, load_here, resolve_here
from fxamp.capture.autocast_state import ambient_autocast, autocast_depth, region_dtypes
from fxamp.errors import PolicyError
from fxamp.graph import need_gradients, source_frames
from fxamp.policy import Policy
from fxamp.policy.file.paths import is_file
from fxamp.reports.registry import follows_autocast
from fxamp.reports.runs import caller
from fxamp.reports.warnings import Example, warn_once
from fxamp.torch_devices import has_gpu, native_bfloat16
from fxamp.torch_dtypes import NARROW
from fxamp.torch_private import (
    called_by_backward,
    compiles_backward,
    guard_current_graph,
    inputs_cast_by_caller,
    running_backward,
)

_FLOAT32 = (
    "policy 'auto' chose float32 for a graph%s, so nothing in it is cast: %s. Name a policy to cast anyway; "
    "fxamp.report lists the policy of each graph"
)
_ON_THE_CPU = "nothing in a graph%s is cast: %s; move its inputs to that device if it should be"

#: The names of guards in Dynamo's messages.
_UNCHANGED = "__fxamp_policy_is_unchanged"
_IN_BACKWARD = "__fxamp_a_backward_runs"
_SURROUNDINGS = "__fxamp_autocast_and_training_are_as_before"


@dataclass(frozen=True)
class Surroundings:
    """The facts about precision around a call on which Dynamo does not guard.

    Dynamo recompiles a model if autocast or gradients are switched on or off. But it does not distinguish a program
    that has switched autocast off from one without autocast, or a reentrant checkpoint, which runs its forward without
    gradients, from an evaluation. ``off``: the program uses torch.autocast, but it is off for this call. ``trains``:
    gradients are on, or will be computed.
    """

    off: bool
    trains: bool

    @staticmethod
    def now(parameters: Sequence[torch.Tensor] = ()) -> "Surroundings":
        """Return the surroundings of the running call of a model or function; its graph reads ``parameters``."""
        off = autocast_depth() > 0 or follows_autocast(caller(sys._getframe(1)), parameters)
        return Surroundings(off, torch.is_grad_enabled() or _inside_checkpoint(sys._getframe(1)))


def _inside_checkpoint(frame: FrameType | None) -> bool:
    """Whether a reentrant checkpoint runs its forward: its backward runs the same code again, with gradients."""
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


@dataclass(frozen=True)
class ChosenPolicy:
    """A resolved policy, or None for plain float32; and the reason as text.

    ``if_it_pays``: the policy is used only if the graph's products gain from it (:meth:`settled`). ``under_autocast``:
    it follows a torch.autocast around the graph or in it. ``only_regions``: as in
    :class:`~fxamp.passes.base.CastContext`. ``surroundings``: those in which it is valid; None for any. ``place``: the
    location of the graph's code, for a warning. ``elsewhere``: a named policy that is for another device, if there is
    no policy for that reason.
    """

    policy: Policy | None
    why: str
    if_it_pays: bool = False
    under_autocast: bool = False
    only_regions: torch.dtype | None = None
    surroundings: Surroundings | None = None
    place: str = ""
    elsewhere: Policy | None = None

    def settled(self, counted: Products) -> "ChosenPolicy":
        """Return the policy for a graph with these products; log float32, unless there are no products."""
        if counted.pay:
            return replace(self, why=f"{self.why}; {counted}", if_it_pays=False)
        why = f"{self.why}, but {'only ' if counted.calls else ''}{counted}"
        if counted.calls:
            few = f"{self.why}, but a graph's products are too small to gain from it (fxamp.report counts them)"
            warn_once(__name__, _FLOAT32, Example(self.place), few)
        return replace(self, policy=None, why=why, if_it_pays=False)


#: Code that Dynamo compiles inside a backward was not traced with its forward, so nothing scales its gradients.
IN_BACKWARD = ChosenPolicy(None, "autograd calls this code in a backward, where it runs as written")
#: The graphs of compiled autograd contain the casts of their forwards, and have lists as inputs.
COMPILED_BACKWARD = ChosenPolicy(None, "compiled autograd compiles this backward, which runs as written")
#: Under autocast, ``custom_fwd`` switches it off for a forward whose inputs it casts.
IN_FORWARD = ChosenPolicy(None, "custom_fwd(cast_inputs=...) calls this code, which then runs as written")


def choose_policy(options: Options, inputs: Sequence[Any], gm: GraphModule | None = None) -> ChosenPolicy:
    """Select and resolve the policy for the graph ``gm``, if it is known, with these ``inputs``.

    "auto" follows the program: the device and dtype of an ambient torch.autocast; the dtypes of the autocast regions in
    the graph, and then casts nothing outside of them. It selects no policy where the program has switched autocast off,
    or has run the model under autocast before but does not now. For a program without autocast it selects float16 if
    there is a scaler and gradients are on; bfloat16 if the device computes in it natively (:func:`native_bfloat16`), on
    a CPU only if the graph's products gain from it (:mod:`fxamp.backend.auto_products`); else no policy, which is
    logged once. A hook, the backward of a Function that no graph holds, its forward if it has ``cast_inputs``, and the
    graph of compiled autograd get no policy, whatever the options say. Raises PolicyError if a named policy is for a
    different device than the graph's tensors, or for another machine; but where there is a GPU, a policy for it casts
    nothing in a graph on the CPU that reads nothing trainable, as autocast does, because parts of a model may run
    there: a detector counts its anchors on the CPU.
    """
    if called_by_backward():
        return IN_BACKWARD
    if compiles_backward():
        return COMPILED_BACKWARD
    place = device_of(inputs)
    if place is not None and inputs_cast_by_caller(place.type) is not None:
        return IN_FORWARD
    if options.policy != "auto":
        return _by_name(options.policy, place, inputs, gm)
    if place is None:
        return ChosenPolicy(None, "the graph has no tensor inputs")
    choice = _by_autocast(place, gm)
    if choice is not None:
        return choice
    surroundings = Surroundings.now([value for value in inputs if isinstance(value, torch.nn.Parameter)])
    return replace(_by_default(place, options, surroundings, gm), surroundings=surroundings)


def _by_name(
    policy: str | Policy, place: torch.device | None, inputs: Sequence[Any], gm: GraphModule | None
) -> ChosenPolicy:
    trains = need_gradients(inputs)
    if place is not None and place.type == "cpu" and not trains and has_gpu(torch.device("cuda")):
        known = policy if isinstance(policy, Policy) else load_here(policy, None)
        if known.device == "cuda":
            why = f"all its tensors are on the CPU, and policy {known.name!r} is for device {known.device!r}"
            warn_once(__name__, _ON_THE_CPU, Example(_place(gm)), why)
            return ChosenPolicy(None, why, elsewhere=known)
    resolved = resolve_here(policy, place) if isinstance(policy, Policy) else load_here(policy, place)
    return ChosenPolicy(resolved, "named by the caller")


def _by_autocast(place: torch.device, gm: GraphModule | None) -> ChosenPolicy | None:
    """Return the policy of a torch.autocast around the graph or in it; None if there is none."""
    device = place.type
    ambient = ambient_autocast(device)
    if ambient is not None:
        choice = _named(place, ambient, f"torch.autocast({device!r}, {ambient}) is active")
        return replace(choice, under_autocast=True)
    opened = [] if gm is None else list(dict.fromkeys(region_dtypes(gm, device)))
    if not opened:
        return None
    current = torch.get_autocast_dtype(device)
    first = next((dtype for dtype in opened if dtype in NARROW), current)
    why = f"torch.autocast in it: {', '.join(map(str, opened))}; nothing is cast outside"
    return replace(_named(place, first, why), under_autocast=True, only_regions=current)


def _by_default(
    place: torch.device, options: Options, surroundings: Surroundings, gm: GraphModule | None
) -> ChosenPolicy:
    device = place.type
    if surroundings.off:
        return ChosenPolicy(None, "the program uses torch.autocast, which is off here")
    if options.scaler is not None and surroundings.trains:
        return _named(place, torch.float16, "there is a scaler")
    if native_bfloat16(place):
        choice = _named(place, torch.bfloat16, f"{device} computes in bfloat16 natively")
        return replace(choice, if_it_pays=device == "cpu", place=_place(gm))
    why = f"{device} has no native bfloat16: float32 is faster there"
    warn_once(__name__, _FLOAT32, Example(_place(gm)), why)
    return ChosenPolicy(None, why)


def _place(gm: GraphModule | None) -> str:
    """Return where the code of a graph is, for a warning."""
    stacks = [source_frames(node) for node in gm.graph.nodes] if gm is not None else []
    frame = next((frames[-1] for frames in stacks if frames), None)
    return "" if frame is None else f" ({frame.file}:{frame.line})"


def _named(place: torch.device, dtype: torch.dtype, why: str) -> ChosenPolicy:
    device = place.type
    if dtype not in NARROW:
        accepted = ", ".join(map(str, NARROW))
        raise PolicyError(f"torch.autocast({device!r}) is active with {dtype}; accepted: {accepted}")
    return ChosenPolicy(resolve_here(Policy.load(f"{device}-{NARROW[dtype]}"), place), why)


def device_of(inputs: Sequence[Any]) -> torch.device | None:
    """Return the graph's device: an accelerator among its tensors', else the CPU; None without tensors."""
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor) and value.device.type != "meta"}
    return min(devices, key=lambda device: (device.type == "cpu", device.type, device.index or 0), default=None)


def guard_policy(options: Options, choice: ChosenPolicy, inputs: Sequence[Any], left: Collection[str] = ()) -> None:
    """Guard the graph being compiled for ``inputs`` against a change of its policy.

    Does nothing outside torch.compile. ``left``: the devices for which the graph leaves autocast's state changed, which
    Dynamo has already changed when it first asks the guards.
    """
    for unchanged in _changes_seen(options, choice, device_of(inputs), left):
        guard_current_graph(_UNCHANGED, unchanged)
    if choice is IN_BACKWARD:
        guard_current_graph(_IN_BACKWARD, lambda: running_backward() != -1)
    if choice.surroundings is not None:
        guard_current_graph(_SURROUNDINGS, lambda: Surroundings.now() == choice.surroundings)


def _changes_seen(
    options: Options, choice: ChosenPolicy, device: torch.device | None, left: Collection[str]
) -> Iterator[Callable[[], bool]]:
    """Yield cheap tests; if all hold, reading the policy again would give the same one."""
    variable, path = os.environ.get("FXAMP_POLICY"), options.policy
    if options.by_environment:
        yield lambda: os.environ.get("FXAMP_POLICY") == variable
    if choice.only_regions is not None and device is not None and device.type not in left:
        kind = device.type
        yield lambda: torch.get_autocast_dtype(kind) == choice.only_regions  # that of regions that name none
    read, device = (choice.elsewhere, None) if choice.policy is None else (choice.policy, device)
    if read is None or not isinstance(path, str) or not path.endswith(".toml"):
        return
    if not Path(options.named).is_absolute():
        # Programs in other folders may have equal options, for which Dynamo shares graphs.
        folder, named = os.getcwd(), options.named  # noqa: PTH109 (called in each call of a graph)
        yield lambda: os.getcwd() == folder or not is_file(named)  # noqa: PTH109
    yield Unchanged(path, device, read)
