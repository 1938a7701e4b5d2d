"""Paths of policy files: tests for their existence, the folder of the shipped ones, and their names in messages."""

import os
from functools import cache
from importlib.resources import files
from pathlib import Path


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a regular file; False, where pathlib raises, for names that no file can have."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a folder; False as in :func:`is_file`."""
    return os.path.isdir(path)  # noqa: PTH112


@cache
def folder() -> Path:
    """Return the folder of the shipped policy files."""
    return Path(str(files("fxamp.policies")))


def shown(path: Path) -> str:
    """Return the name of a policy file in messages: shipped ones without the folder they are installed in."""
    return f"policies/{path.name}" if path.parent == folder() else str(path)


def is_built_in(shown_file: str) -> bool:
    """Return whether ``shown_file``, a result of :func:`shown`, is a shipped file."""
    return shown_file in _shown_files()


@cache
def _shown_files() -> frozenset[str]:
    return frozenset(shown(path) for path in folder().glob("*.toml"))
