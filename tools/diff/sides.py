"""The two policies of a comparison, each resolved; op tables, which define no dtype, can be compared too."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations
from pathlib import Path

from fxamp.devices import DEVICES
from fxamp.errors import OptionError, PolicyError, nearest
from fxamp.policy import Policy
from fxamp.policy.model.comparisons import holds, installed_torch_version

#: The tool's name, for messages on stderr.
PROG = "fxamp-diff"

#: The settings that an op table may leave out, with the values to use if a policy needs one.
_OPEN = {"lower_precision_fp": "float16", "device": "cuda"}
_KEYS = {"lower_precision_fp": "lower_precision_fp", "device": "match.device"}


@dataclass(frozen=True)
class Side:
    """A resolved policy, the name or path that it was loaded by, and the settings that none of its files define."""

    policy: Policy
    source: str
    open: frozenset[str] = frozenset()

    @property
    def about(self) -> str:
        """Return one line about the policy: its name, its file, and what it is for."""
        settings = [("for", "device"), ("in", "lower_precision_fp")]
        words = [f"{word} {getattr(self.policy, key)}" for word, key in settings if key not in self.open]
        file = f" ({self.source})" if self.source != self.policy.name else ""
        return f"{self.policy.name}{file}{', ' if words else ''}{' '.join(words)}"


def load_side(source: str, device: str | None, torch_version: str | None) -> Side:
    """Load the policy of a built-in name or a path, and resolve it for a device and a version of torch.

    Raises PolicyError with every mistake of its files, or if it is not for that device or version; OptionError for a
    device that no policy supports.
    """
    kind = None if device is None else device.partition(":")[0]
    if kind is not None and kind not in DEVICES:
        hint = nearest(kind, DEVICES)
        raise OptionError(f"--device {device!r} is unknown{hint}; accepted: {', '.join(DEVICES)}")
    try:
        policy, missing = Policy.load(source), frozenset[str]()
    except PolicyError as error:
        table, name = f"extends = [{json.dumps(source)}]\n", Path(source).stem
        known = {} if kind is None else {"device": kind}
        policy, missing = load_table(lambda settings: Policy.loads(table + settings, name), error, known)
    except OSError as error:
        raise PolicyError(f"{source}: {error.strerror}") from error
    return resolved(Side(policy, source, missing), device, torch_version)


def load_table(
    load: Callable[[str], Policy], error: PolicyError, known: Mapping[str, str]
) -> tuple[Policy, frozenset[str]]:
    """Load a file that may leave the dtype and the device out, as the op tables that policies extend do.

    ``load`` reads the file after a text that adds what is missing; ``known`` are the values to add. Returns the policy
    and the names of what it leaves out. Raises ``error`` if that has another cause.
    """
    values = {**_OPEN, **known}
    for missing in chain.from_iterable(combinations(values, count) for count in (1, 2)):
        try:
            policy = load("".join(f"{_KEYS[key]} = {json.dumps(values[key])}\n" for key in missing))
        except PolicyError:
            continue
        return policy, frozenset(missing) - known.keys()
    raise error


def resolved(side: Side, device: str | None, torch_version: str | None) -> Side:
    """Return the side with its policy resolved, for the installed torch unless a version is given."""
    policy = side.policy
    try:
        version = torch_version or installed_torch_version()
    except PolicyError as error:
        raise PolicyError("torch is not installed; --torch V sets the version to compare for") from error
    if torch_version is None and policy.torch and not holds(policy.torch, version):
        needs = f"policy {policy.name!r} needs torch {policy.torch}, but torch {version} is installed"
        raise PolicyError(f"{needs}; --torch V compares for another version")
    return replace(side, policy=policy.resolve(device, version))
