"""Reads a policy file and the files that it extends, and merges them."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

from fxamp.errors import PolicyError, nearest
from fxamp.policy.file.builtin import built_in_names, find, folder, shown, variant_names
from fxamp.policy.file.check_file import PolicyFile, check_file
from fxamp.policy.file.existence import is_file, is_folder
from fxamp.policy.file.lines import Path as KeyPath
from fxamp.policy.file.lines import index_lines
from fxamp.policy.file.merge import Merge

#: The most bytes of a policy file.
LARGEST = 16 * 2**20

#: How many files may extend each other in a row.
DEEPEST = 100


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


def files_of(name_or_path: "str | PathLike[str]") -> list[Path]:
    """Return the files of a policy or a table without mistakes: what it extends first, itself last."""
    path = find(name_or_path)
    reader = _Reader(part=True)
    reader.add_file(path, ())
    return [Path(file) for file in reader.merge.sources][::-1]


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
            if not is_file(path):
                file.mistake(line, f"extends {name!r}, but there is no file {shown(path)!r}{_suggest(path)}")
                continue
            resolved = path.resolve()
            if resolved in chain:
                circle = [*chain[chain.index(resolved) :], resolved]
                file.mistake(line, f"extends goes in a circle: {' -> '.join(each.name for each in circle)}")
            elif len(chain) >= DEEPEST:
                file.mistake(line, f"extends {name!r} is {DEEPEST} files deep; accepted: at most {DEEPEST} in a row")
            elif resolved not in self._seen:
                self.add_file(path, chain)
        self.merge.add(file)


def _read(path: Path) -> PolicyFile:
    try:
        with path.open("rb") as stream:
            content = stream.read(LARGEST + 1)
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PolicyError(f"{shown(path)}: not UTF-8 text: {error}") from error
    except OSError as error:
        raise PolicyError(f"{shown(path)}: {error.strerror}") from error
    if len(content) > LARGEST:
        raise PolicyError(f"{shown(path)}: it holds more than {LARGEST >> 20} MiB; accepted: a policy file, of rules")
    return _parse(text, shown(path))


def _parse(text: str, name: str) -> PolicyFile:
    """Parse and check one file, whose mistakes the caller may add to."""
    checked = _checked(text, name)
    return replace(checked, mistakes=[*checked.mistakes])


@lru_cache(maxsize=64)
def _checked(text: str, name: str) -> PolicyFile:
    """Parse and check one file; if the TOML is malformed, that is its only mistake."""
    file = PolicyFile(name)
    try:
        data = tomllib.loads(text)
        lines = index_lines(text)
        large = next(_large_numbers(data, ()), None)
    except tomllib.TOMLDecodeError as error:
        file.mistake(_line_of(error, text), f"not TOML: {error}")
    except ValueError:  # an integer whose digits are too many for Python
        line, digits = _longest_number(text)
        file.mistake(line, f"a number has {digits} digits; accepted: numbers of 64 bits")
    except RecursionError:
        file.mistake(1, "its lists or tables are nested too deeply")
    else:
        if large is None:
            return check_file(name, data, lines)
        file.mistake(lines.line(large), f"{large[-1]} is too large a number; accepted: numbers of 64 bits")
    return file


def _large_numbers(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield the paths of the integers in a parsed TOML value that do not fit in 64 bits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield path
    elif isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _large_numbers(item, (*path, key))


def _line_of(error: tomllib.TOMLDecodeError, text: str) -> int:
    match = re.search(r"at line (\d+)", str(error))
    return int(match[1]) if match else text.rstrip().count("\n") + 1


def _longest_number(text: str) -> tuple[int, int]:
    """Return the line and the length of the longest run of digits."""
    longest = max(re.finditer(r"[\d_]+", text), key=lambda run: len(run[0]))
    return text.count("\n", 0, longest.start()) + 1, len(longest[0])


def _extended(beside: Path, name: str) -> Path:
    """Return the file that ``name`` in ``extends`` means: one beside the extending file, else a built-in one."""
    near = beside / name
    built_in = folder() / (name if name.endswith(".toml") else f"{name}.toml")
    return built_in if not is_file(near) and is_file(built_in) else near


def _suggest(path: Path) -> str:
    known = {each.name for base in (path.parent, folder()) if is_folder(base) for each in base.glob("*.toml")}
    return nearest(path.name, known | {*built_in_names(), *variant_names()})
