"""Globs on dotted module paths: ``layers.*.router``, ``lm_head``, ``encoder.**.norm``."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

ACCEPTED = "a dotted path such as 'lm_head' or 'layers.*.router'; *, ? and [...] match within a part, ** any parts"

_GLOB = re.compile(r"\.?[^.\s]+(?:\.[^.\s]+)*")


def module_glob(text: str) -> str:
    """Return ``text`` if it is a glob on module paths; raise ValueError otherwise."""
    if not _GLOB.fullmatch(text):
        raise ValueError(f"{text!r} is not a module path; accepted: {ACCEPTED}")
    return text


def class_glob(text: str) -> str:
    """Return ``text`` if it is a glob on class names; raise ValueError otherwise."""
    if not text.strip() or " " in text:
        raise ValueError(f"{text!r} is not a class name; accepted: a name or glob such as 'LayerNorm' or '*RMSNorm'")
    return text


@lru_cache(maxsize=4096)
def covers_module(glob: str, path: str) -> bool:
    """Return whether ``glob`` matches the module at ``path`` or one of its parents.

    ``*`` matches within one part of the path, ``**`` any number of parts. A match may start at any part; a leading dot
    anchors it at the root: ``norm`` covers ``layers.0.norm``, ``.norm`` does not.
    """
    parts = path.split(".") if path else []
    starts = {0} if glob.startswith(".") else set(range(len(parts) + 1))
    return _covers(glob.removeprefix(".").split("."), parts, starts)


def _covers(globs: Sequence[str], parts: Sequence[str], starts: set[int]) -> bool:
    """Return whether the glob's parts match the path's from one of ``starts`` on."""
    reached = starts
    for glob in globs:
        if not reached:
            return False
        if glob == "**":
            reached = set(range(min(reached), len(parts) + 1))
        else:
            reached = {at + 1 for at in reached if at < len(parts) and fnmatchcase(parts[at], glob)}
    return bool(reached)


def covers_class(glob: str, qualified: str) -> bool:
    """Return whether ``glob`` matches a class by its name (``LlamaRMSNorm``) or by its qualified name."""
    return fnmatchcase(qualified.rpartition(".")[2], glob) or fnmatchcase(qualified, glob)
