"""Select the policy for a listing, and reject graphs to which no policy can be applied."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fxamp.devices import DEVICES
from fxamp.errors import ListingError, OptionError, nearest
from fxamp.graph_text import Listing
from fxamp.policy import Policy
from fxamp.policy.model.match import architecture


@dataclass(frozen=True)
class Request:
    """The user's request for an input.

    ``policy``: a built-in name, a path, or "auto". None does not change a graph that is given as text, and means "auto"
    for a program. ``device``: the program's device ("cuda", "cuda:1"), which this machine need not have; None: the
    device of its tensors. ``trust`` allows running code of the input: a .pt2, an fx_graph_runnable.py whose
    text is not enough. ``prog`` is the tool's name, for messages on stderr. ``kept`` asks which values a compiled
    forward keeps for the backward; under a policy with rules for them they are listed in any case. ``arch``: that of
    the AMD GPU in whose 8-bit formats products run.
    """

    policy: str | None = None
    device: str | None = None
    trust: bool = False
    prog: str = "fxamp-show"
    kept: bool = False
    arch: str | None = None

    def __post_init__(self) -> None:
        if self.arch is not None:
            try:
                architecture(self.arch)
            except ValueError as error:
                raise OptionError(f"--arch: {error}") from error
        if self.device is not None and self.kind not in DEVICES:
            hint = nearest(self.kind, DEVICES)
            raise OptionError(f"--device {self.device!r} is unknown{hint}; accepted: {', '.join(DEVICES)}")

    @property
    def kind(self) -> str:
        """Return the requested device type, ``""`` without a request."""
        return (self.device or "").partition(":")[0]

    @property
    def plain(self) -> bool:
        """Whether no policy is requested."""
        return self.policy is None and self.device is None and self.arch is None


def choose(request: Request, device: str) -> tuple[Policy, str]:
    """Return the resolved policy for a program on ``device`` (``""`` if unknown), and why it was chosen.

    "auto" selects bfloat16 for the device, even if that would be slow: nothing is run here. Raises PolicyError if the
    policy does not exist, or is for a different device than the requested one or the program's.
    """
    if request.policy is None or request.policy == "auto":
        kind = request.kind or device or "cpu"
        policy = _resolved(f"{kind}-bfloat16", kind, request.arch)
        return policy, f"bfloat16 is the default on {kind}; --policy names another"
    expected = request.kind or (device if device != "cpu" else "")
    return _resolved(request.policy, expected, request.arch), "named by --policy"


def _resolved(name: str, device: str, arch: str | None) -> Policy:
    return Policy.load(name).resolve(device or None, arch=arch)


#: By stage: why no policy can be applied to a graph.
_STAGES: Mapping[str, str] = {
    "cast": "it has the casts of policy {policy!r} already",
    "forward": "it is the forward that AOTAutograd made after the casts",
    "backward": "it is a backward, whose dtypes follow from its forward",
    "joint": "it holds a backward, whose dtypes follow from its forward",
    "optimizer": "it is an optimizer's step, to which no policy applies",
}


def refuse(listing: Listing, file: str) -> None:
    """Raise ListingError if no policy can be applied to a graph that was read from ``file``."""
    stage = _stage(listing)
    captured = Path(file).with_name(Path(file).name.replace(f"_{listing.stage}.", "_captured."))
    ours = captured.name != Path(file).name and captured.is_file()
    if stage not in _STAGES or (stage == "forward" and not ours):
        return
    why = _STAGES[stage].format(policy=listing.policy)
    instead = str(captured) if ours else "the graph as it was captured"
    raise ListingError(f"{file}: --policy cannot be applied to {listing.name}: {why}; accepted: {instead}")


def _stage(listing: Listing) -> str:
    if any(entry.inserted for _, entry in listing.walk()):
        return "cast"
    if listing.has_tangents:
        return listing.stage if listing.stage in ("backward", "joint") else "backward"
    return listing.stage


def is_lowered(listing: Listing) -> bool:
    """Whether a graph comes from AOTAutograd: its composite ops are decomposed."""
    inputs = [entry.name for entry in listing.entries if entry.kind == "placeholder"]
    return listing.stage != "captured" and any(name.startswith(("primals_", "arg0_1")) for name in inputs)
