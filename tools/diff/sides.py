"""The two policies of a comparison, each resolved; op tables, which define no dtype, can be compared too."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations
from pathlib import Path

from fxamp.devices import DEVICES
from fxamp.errors import OptionError, PolicyError, nearest
from fxamp.policy import Policy
from fxamp.policy.model.comparisons import holds, installed_torch_version

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
        policy, missing = _load_table(source, error, {} if kind is None else {"device": kind})
    except OSError as error:
        raise PolicyError(f"{source}: {error.strerror}") from error
    return _resolved(Side(policy, source, missing), device, torch_version)


def _load_table(source: str, error: PolicyError, known: Mapping[str, str]) -> tuple[Policy, frozenset[str]]:
    """Load a file that may leave the dtype and the device out, as the op tables that policies extend do.

    ``known``: the values of these that the user gave. Returns the policy and the names of what it leaves out. Raises
    ``error`` if that has another cause.
    """
    values, table = {**_OPEN, **known}, f"extends = [{json.dumps(source)}]\n"
    for missing in chain.from_iterable(combinations(values, count) for count in (1, 2)):
        settings = "".join(f"{_KEYS[key]} = {json.dumps(values[key])}\n" for key in missing)
        try:
            policy = Policy.loads(table + settings, Path(source).stem)
        except PolicyError:
            continue
        return policy, frozenset(missing) - known.keys()
    raise error


def _resolved(side: Side, device: str | None, torch_version: str | None) -> Side:
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
