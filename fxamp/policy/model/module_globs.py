"""Globs on dotted module paths: ``layers.*.router``, ``lm_head``, ``encoder.**.norm``."""

import re
from fnmatch import fnmatchcase
from functools import lru_cache

ACCEPTED = "a dotted path whose parts may hold *, ? and [...], such as 'lm_head' or 'layers.*.router'; ** is any parts"

_GLOB = re.compile(r"\.?[^.\s]+(?:\.[^.\s]+)*")


def module_glob(text: str) -> str:
    """Return ``text`` if it is a glob on module paths; raise ValueError otherwise."""
    if not _GLOB.fullmatch(text):
        raise ValueError(f"{text!r} is not a module path; accepted: {ACCEPTED}")
    return text


@lru_cache(maxsize=4096)
def covers_module(glob: str, path: str) -> bool:
    """Say whether ``glob`` covers the module at ``path``, or one that it is part of.

    ``*`` stays within one part of the path, ``**`` stands for any number of parts. A glob may begin at any part; one
    that begins with a dot begins at the root: ``norm`` covers ``layers.0.norm``, ``.norm`` does not.
    """
    parts = tuple(path.split(".")) if path else ()
    if glob.startswith("."):
        return _covers(tuple(glob[1:].split(".")), parts)
    wanted = tuple(glob.split("."))
    return any(_covers(wanted, parts[start:]) for start in range(len(parts) + 1))


def _covers(wanted: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Whether the glob's parts match the beginning of the path's."""
    if not wanted:
        return True
    if wanted[0] == "**":
        return any(_covers(wanted[1:], parts[skipped:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and _covers(wanted[1:], parts[1:])


def covers_class(glob: str, qualified: str) -> bool:
    """Say whether ``glob`` covers a class, by its name (``LlamaRMSNorm``) or with the module that defines it."""
    return fnmatchcase(qualified.rpartition(".")[2], glob) or fnmatchcase(qualified, glob)
