"""Reads a policy file and the files that it extends, and merges them."""

import re
import tomllib
from dataclasses import replace
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

from fxamp.errors import PolicyError, nearest
from fxamp.policy.file.builtin import built_in_names, find, folder, shown, variant_names
from fxamp.policy.file.check_file import PolicyFile, check_file
from fxamp.policy.file.lines import index_lines
from fxamp.policy.file.merge import Merge


def read_file(name_or_path: "str | PathLike[str]") -> dict[str, Any]:
    """Return the arguments of :class:`fxamp.Policy` that a built-in name or a path ending in ``.toml`` stands for.

    The files that it extends come first, in their order, each once. Later values win, and a later rule replaces an
    earlier one with the same id, in its place. Raises PolicyError, listing every mistake in all these files as
    ``file:line: message``.
    """
    path = find(name_or_path)
    reader = _Reader()
    reader.add_file(path, ())
    return reader.merge.arguments(path.stem, shown(path))


def mistakes_of(name_or_path: "str | PathLike[str]", part: bool = False) -> list[str]:
    """Return every mistake in a policy and the files that it extends; ``part``: it is a table, not a whole policy.

    Raises PolicyError if there is no such file.
    """
    path = find(name_or_path)
    reader = _Reader(part)
    reader.add_file(path, ())
    return reader.merge.mistakes(shown(path))


def read_text(text: str, name: str) -> dict[str, Any]:
    """Return the arguments of :class:`fxamp.Policy` from a file's text; messages call the file ``name``.

    Like :func:`read_file`, it raises PolicyError with every mistake.
    """
    reader = _Reader()
    reader.add(_parse(text, name), Path(), ())
    return reader.merge.arguments(name, name)


class _Reader:
    """Reads files in the order of precedence: what a file extends comes before the file, and no file comes twice."""

    def __init__(self, part: bool = False) -> None:
        self.merge = Merge(part)
        self._seen: set[Path] = set()

    def add_file(self, path: Path, chain: tuple[Path, ...]) -> None:
        """Add the file at ``path``; ``chain`` holds the files that extend each other up to it."""
        self._seen.add(path.resolve())
        self.merge.sources[str(path)] = None
        self.add(_read(path), path.parent, (*chain, path.resolve()))

    def add(self, file: PolicyFile, beside: Path, chain: tuple[Path, ...]) -> None:
        """Add a file after all files that it extends; these are looked up in the folder ``beside`` first."""
        for name, line in file.extends:
            path = _extended(beside, name)
            resolved = path.resolve()
            if resolved in chain:
                circle = [*chain[chain.index(resolved) :], resolved]
                file.mistake(line, f"extends goes in a circle: {' -> '.join(each.name for each in circle)}")
            elif not path.is_file():
                file.mistake(line, f"extends {name!r}, but there is no file {shown(path)}{_suggest(path)}")
            elif resolved not in self._seen:
                self.add_file(path, chain)
        self.merge.add(file)


def _read(path: Path) -> PolicyFile:
    try:
        return _parse(path.read_text(encoding="utf-8"), shown(path))
    except UnicodeDecodeError as error:
        raise PolicyError(f"{shown(path)}: not UTF-8 text: {error}") from error


def _parse(text: str, name: str) -> PolicyFile:
    """Parse and check one file, whose mistakes the caller may add to."""
    checked = _checked(text, name)
    return replace(checked, mistakes=[*checked.mistakes])


@lru_cache(maxsize=64)
def _checked(text: str, name: str) -> PolicyFile:
    """Parse and check one file; if the TOML is malformed, that is its only mistake."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        file = PolicyFile(name)
        file.mistake(_line_of(error, text), f"not TOML: {error}")
        return file
    return check_file(name, data, index_lines(text))


def _line_of(error: tomllib.TOMLDecodeError, text: str) -> int:
    match = re.search(r"at line (\d+)", str(error))
    return int(match[1]) if match else text.rstrip().count("\n") + 1


def _extended(beside: Path, name: str) -> Path:
    """Return the file that ``name`` in ``extends`` means: one beside the extending file, else a built-in one."""
    near = beside / name
    built_in = folder() / (name if name.endswith(".toml") else f"{name}.toml")
    return built_in if not near.is_file() and built_in.is_file() else near


def _suggest(path: Path) -> str:
    known = {each.name for base in (path.parent, folder()) for each in base.glob("*.toml")}
    return nearest(path.name, known | {*built_in_names(), *variant_names()})
