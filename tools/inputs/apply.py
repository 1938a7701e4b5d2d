"""Which policy a listing is made for, and why; and what no policy can be applied to."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fxamp.errors import ListingError, OptionError, nearest
from fxamp.listing import Listing
from fxamp.policy import Policy
from fxamp.targets import DEVICES


@dataclass(frozen=True)
class Request:
    """What is asked of an input.

    ``policy``: a built-in name, a path, or "auto"; None leaves a graph that is text as it is, and means "auto" for a
    program. ``device``: where the program shall run ("cuda", "cuda:1"), which this machine need not have; None means
    where its tensors are. ``trust`` allows running what only running can tell: fx_graph_runnable.py, pickled objects.
    ``prog`` is the tool's name, for what is said on stderr.
    """

    policy: str | None = None
    device: str | None = None
    trust: bool = False
    prog: str = "fxamp-show"

    def __post_init__(self) -> None:
        if self.device is not None and self.kind not in DEVICES:
            hint = nearest(self.kind, DEVICES)
            raise OptionError(f"--device {self.device!r} is unknown{hint}; accepted: {', '.join(DEVICES)}")

    @property
    def kind(self) -> str:
        """The kind of device asked for, ``""`` if none was."""
        return (self.device or "").partition(":")[0]

    @property
    def plain(self) -> bool:
        """Whether no policy is asked for."""
        return self.policy is None and self.device is None


def choose(request: Request, device: str) -> tuple[Policy, str]:
    """The policy, resolved, for a program that runs on ``device`` (``""`` if unknown); and why it is this one.

    "auto" is bfloat16 on the device: here nothing is run, so it does not matter whether it would be fast. Raises
    PolicyError if the policy does not exist, or is for another device than that asked for or that of the program.
    """
    if request.policy is None or request.policy == "auto":
        kind = request.kind or device or "cpu"
        return _resolved(f"{kind}-bfloat16", kind), f"bfloat16 is the default on {kind}; --policy names another"
    expected = request.kind or (device if device != "cpu" else "")
    return _resolved(request.policy, expected), "named by --policy"


def _resolved(name: str, device: str) -> Policy:
    policy = Policy.load(name)
    return policy.resolve(device) if device else policy.resolve()


#: Why no policy is applied to a graph of that stage.
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
    if any(entry.kind == "placeholder" and entry.name.startswith("tangents_") for entry in listing.entries):
        return listing.stage if listing.stage in ("backward", "joint") else "backward"
    return listing.stage


def is_lowered(listing: Listing) -> bool:
    """Whether a graph is one of AOTAutograd's: its composite ops are decomposed."""
    inputs = [entry.name for entry in listing.entries if entry.kind == "placeholder"]
    return listing.stage != "captured" and any(name.startswith(("primals_", "arg0_1")) for name in inputs)
