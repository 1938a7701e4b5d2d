"""Load and resolve policies for this machine, while their files can change.

It also decides which file a relative path means, and which policy applies while a file cannot be read.
"""

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fxamp.errors import PolicyError
from fxamp.policy import Policy
from fxamp.policy.file.paths import is_file
from fxamp.reports.warnings import warn_once
from fxamp.torch_devices import has_gpu

#: The coarsest clock of a file system, in nanoseconds: a younger file can change without getting a new time.
_TICK = 2 * 10**9

_absolute: dict[tuple[int, str], tuple[object, str]] = {}
_read: dict[tuple[str, torch.device | None], Policy] = {}

_GONE_WRONG = "policy file %s is missing or has mistakes now, so its last good version stays in force: %s"


def absolute(name_or_path: str, named_in: object) -> str:
    """Return a path as an absolute one, and a name as it is.

    ``named_in``: the options, or the environment, that name it. A relative path always means the file that it meant
    first, even if the working directory changes.
    """
    if not name_or_path.endswith(".toml") or Path(name_or_path).is_absolute():
        return name_or_path
    key = (id(named_in), name_or_path)
    if key not in _absolute and is_file(name_or_path):
        _absolute[key] = named_in, str(Path(name_or_path).absolute())
    return _absolute[key][1] if key in _absolute else name_or_path


def load_here(name_or_path: str, device: torch.device | None) -> Policy:
    """Return the policy for graphs with tensors on ``device``, resolved for this machine.

    If a file that was read before is gone or has mistakes, its last version applies; this is logged once. Raises
    PolicyError for any other mistake.
    """
    try:
        policy = resolve_here(Policy.load(name_or_path), device)
    except PolicyError as error:
        if (name_or_path, device) not in _read:
            raise
        warn_once(__name__, _GONE_WRONG, name_or_path, str(error))
        return _read[name_or_path, device]
    if name_or_path.endswith(".toml"):
        _read[name_or_path, device] = policy
    return policy


def resolve_here(policy: Policy, device: torch.device | None) -> Policy:
    """Resolve ``policy`` for a graph with tensors on ``device``; None if it has no tensors.

    If this machine lacks the device (FakeTensors on a laptop), conditions on it are not checked. Raises PolicyError if
    the policy does not apply.
    """
    return policy.resolve(None if device is None else device.type, **_facts(device or torch.device(policy.device)))


def _facts(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        supported = torch.cpu.get_capabilities()
        return {"cpu_features": frozenset(name for name, value in supported.items() if value is True)}
    if device.type != "cuda" or not has_gpu(device):
        return {}
    if torch.version.hip:
        # Features follow the name: "gfx942:sramecc+:xnack-".
        return {"arch": torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]}
    return {"capability": torch.cuda.get_device_capability(device)}


class Unchanged:
    """A guard that each call of a graph runs: whether the policy file still decides as the graph was compiled.

    ``policy``: the result of :func:`load_here` for ``path`` and ``device``. A call checks the files' status, and reads
    the files only if it differs, or if they are too new for their times to show a change.
    """

    def __init__(self, path: str, device: torch.device | None, policy: Policy) -> None:
        self._path, self._device, self._policy = path, device, policy
        self._watch(policy.sources)
        if load_here(path, device) != policy:  # changed while the graph was compiled
            self._contents = ""

    def __call__(self) -> bool:
        now = _status(self._files)
        if now == self._seen and self._settled:
            return True
        if _contents(self._files) != self._contents:
            policy = load_here(self._path, self._device)
            if policy != self._policy:
                return False
            self._policy = policy
        self._watch(self._policy.sources)
        return True

    def _watch(self, files: Sequence[str]) -> None:
        self._files = files
        started = time.time_ns()
        self._seen = _status(files)
        self._contents = _contents(files)
        self._settled = all(status is None or max(status[:2]) + _TICK < started for status in self._seen)


def _status(files: Sequence[str]) -> list[tuple[int, ...] | None]:
    return [_status_of(file) for file in files]


def _status_of(file: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(file)  # noqa: PTH116 (called in each call of a graph)
    except OSError:
        return None
    return status.st_ctime_ns, status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev


def _contents(files: Sequence[str]) -> str:
    """Return one digest of all contents; a file that cannot be read has none."""
    whole = hashlib.sha256()
    for file in files:
        try:
            content = Path(file).read_bytes()
        except OSError:
            content = b""
        whole.update(hashlib.sha256(content).digest())
    return whole.hexdigest()
