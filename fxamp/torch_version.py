"""Refuse a torch that fxamp cannot work with when fxamp is imported, before an import inside torch fails."""

import re
from importlib.util import find_spec
from pathlib import Path

from fxamp.errors import VersionError

#: The first version that works, and the first that is not tested.
OLDEST, UNTESTED = (2, 11), (2, 16)


def require_torch() -> None:
    """Raise VersionError for a torch that is too old; log a warning for one that is newer than the tested ones.

    Without torch nothing happens: policies and graphs can be read as text.
    """
    match = re.search(r"__version__ = '((\d+)\.(\d+)[^']*)'", _version_file())
    if match is None:
        return
    version, installed = match[1], (int(match[2]), int(match[3]))
    accepted = f"torch>={_text(OLDEST)},<{_text(UNTESTED)}"
    if installed < OLDEST:
        raise VersionError(
            f"torch {version} is installed; accepted: {_text(OLDEST)} or newer, by pip install '{accepted}'"
        )
    if installed >= UNTESTED:
        import logging

        log = logging.getLogger(__name__)
        log.warning("torch %s is newer than the versions that fxamp is tested with: %s", version, accepted)


def _version_file() -> str:
    """Return the text of torch/version.py, without importing torch or the slow importlib.metadata; "" without torch."""
    spec = find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    return path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
