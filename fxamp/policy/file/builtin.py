"""The built-in policies, and the file that a name or path means."""

import re
from functools import cache
from importlib.resources import files
from os import PathLike, fspath
from pathlib import Path

from fxamp.devices import DEVICES
from fxamp.dtypes import DTYPES
from fxamp.errors import PolicyError, nearest
from fxamp.policy.file.existence import is_file


@cache
def folder() -> Path:
    """Return the folder of the built-in policy files."""
    return Path(str(files("fxamp.policies")))


@cache
def built_in_names() -> tuple[str, ...]:
    """Return the names of the policies that agree with torch.autocast, sorted: "cpu-bfloat16", "cpu-float16", ...

    A built-in policy's file is named ``DEVICE-DTYPE.toml``, a variant's ``DEVICE-DTYPE-NAME.toml``; they extend the
    tables in the other files.
    """
    return tuple(name for name, variant in _names() if not variant)


@cache
def variant_names() -> tuple[str, ...]:
    """Return the names of the policies that differ from torch.autocast on purpose, sorted: "cpu-bfloat16-moe", ..."""
    return tuple(name for name, variant in _names() if variant)


def _names() -> list[tuple[str, str]]:
    """Return every policy's name with the name of its variant, ``""`` for none."""
    matches = [(path.stem, _POLICY.fullmatch(path.stem)) for path in folder().glob("*.toml")]
    return sorted((name, match[1] or "") for name, match in matches if match is not None)


_POLICY = re.compile(rf"(?:{'|'.join(DEVICES)})-(?:{'|'.join(DTYPES)})(?:-(.+))?")


def find(name_or_path: "str | PathLike[str]") -> Path:
    """Return the file that a built-in name or a path ending in ``.toml`` means; raise PolicyError if there is none."""
    given = fspath(name_or_path)
    if not given.endswith(".toml"):
        if given in (*built_in_names(), *variant_names()):
            return folder() / f"{given}.toml"
        raise PolicyError(f"no policy is named {given!r}{_nearest(given)}; {_accepted()}")
    if is_file(given):
        return Path(given)
    raise PolicyError(f"there is no policy file {given!r}{_nearest(Path(given).stem)}; {_accepted()}")


def shown(path: Path) -> str:
    """Return the name of a policy file in messages: built-in ones without the folder they are installed in."""
    return f"policies/{path.name}" if path.parent == folder() else str(path)


def is_built_in(shown_file: str) -> bool:
    """Return whether ``shown_file``, a result of :func:`shown`, is a built-in file."""
    return shown_file in _shown_files()


@cache
def _shown_files() -> frozenset[str]:
    return frozenset(shown(path) for path in folder().glob("*.toml"))


def _nearest(given: str) -> str:
    return nearest(given, (*built_in_names(), *variant_names()))


def _accepted() -> str:
    names, variants = built_in_names(), len(variant_names())
    return (
        f"accepted: a path ending in .toml, or one of {', '.join(names)} and their {variants} variants "
        "(fxamp-policy list prints all)"
    )
