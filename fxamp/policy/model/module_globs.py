"""Globs on dotted module paths: ``layers.*.router``, ``lm_head``, ``encoder.**.norm``."""

import re
from fnmatch import fnmatchcase
from functools import lru_cache

ACCEPTED = "a dotted path such as 'lm_head' or 'layers.*.router'; *, ? and [...] match within a part, ** any parts"

_GLOB = re.compile(r"\.?[^.\s]+(?:\.[^.\s]+)*")


def module_glob(text: str) -> str:
    """Return ``text`` if it is a glob on module paths; raise ValueError otherwise."""
    if not _GLOB.fullmatch(text):
        raise ValueError(f"{text!r} is not a module path; accepted: {ACCEPTED}")
    return text


@lru_cache(maxsize=4096)
def covers_module(glob: str, path: str) -> bool:
    """Return whether ``glob`` matches the module at ``path`` or one of its parents.

    ``*`` matches within one part of the path, ``**`` any number of parts. A match may start at any part; a leading dot
    anchors it at the root: ``norm`` covers ``layers.0.norm``, ``.norm`` does not.
    """
    parts = tuple(path.split(".")) if path else ()
    if glob.startswith("."):
        return _covers(tuple(glob[1:].split(".")), parts)
    wanted = tuple(glob.split("."))
    return any(_covers(wanted, parts[start:]) for start in range(len(parts) + 1))


def _covers(wanted: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Return whether the glob's parts match the first parts of the path."""
    if not wanted:
        return True
    if wanted[0] == "**":
        return any(_covers(wanted[1:], parts[skipped:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and _covers(wanted[1:], parts[1:])


def covers_class(glob: str, qualified: str) -> bool:
    """Return whether ``glob`` matches a class by its name (``LlamaRMSNorm``) or by its qualified name."""
    return fnmatchcase(qualified.rpartition(".")[2], glob) or fnmatchcase(qualified, glob)
