"""Read a policy file and the files that it extends, and merge them."""

from os import PathLike
from pathlib import Path
from typing import Any

from fxamp.errors import nearest
from fxamp.policy.file.check_file import PolicyFile
from fxamp.policy.file.merge import Merge
from fxamp.policy.file.parse import parse, read
from fxamp.policy.file.paths import folder, is_file, is_folder, shown
from fxamp.policy.file.shipped import built_in_names, composed, find, variant_names

#: The maximum length of a chain of files that extend each other.
DEEPEST = 100


def read_file(name_or_path: "str | PathLike[str]") -> dict[str, Any]:
    """Return the arguments of :class:`fxamp.Policy` that a shipped name or a path ending in ``.toml`` stands for.

    The files that it extends come first, in their order, each once. Later values win, and a later rule replaces an
    earlier one with the same id, in its place. Raises PolicyError, listing every mistake in all these files as
    ``file:line: message``.
    """
    path, merge = _merged(name_or_path)
    return merge.arguments(path.stem, shown(path))


def mistakes_of(name_or_path: "str | PathLike[str]", part: bool = False) -> list[str]:
    """Return every mistake in a policy and the files that it extends; ``part``: the file is an op table, not a policy.

    Raises PolicyError if there is no such file.
    """
    path, merge = _merged(name_or_path, part)
    return merge.mistakes(shown(path))


def files_of(name_or_path: "str | PathLike[str]") -> list[Path]:
    """Return the files of a policy or op table that has no mistakes: the ones that it extends first, itself last."""
    return [Path(file) for file in _merged(name_or_path, part=True)[1].sources][::-1]


def read_text(text: str, name: str) -> dict[str, Any]:
    """Return the arguments of :class:`fxamp.Policy` from a file's text; messages call the file ``name``.

    Like :func:`read_file`, it raises PolicyError with every mistake.
    """
    reader = _Reader()
    reader.add(parse(text, name), Path(), ())
    return reader.merge.arguments(name, name)


def _merged(name_or_path: "str | PathLike[str]", part: bool = False) -> tuple[Path, Merge]:
    path = find(name_or_path)
    reader = _Reader(part)
    reader.add_file(path, ())
    return path, reader.merge


class _Reader:
    """Reads files in the order of precedence: what a file extends comes before the file, and no file comes twice."""

    def __init__(self, part: bool = False) -> None:
        self.merge = Merge(part)
        self._seen: set[Path] = set()

    def add_file(self, path: Path, chain: tuple[Path, ...]) -> None:
        """Add the file or the shipped policy at ``path``; ``chain`` holds the files that extend each other up to it."""
        resolved, shipped = path.resolve(), None if is_file(path) else composed(path)
        self._seen.add(resolved)
        if shipped is None:
            self.merge.sources[str(path)] = None
        self.add(read(path) if shipped is None else shipped.file(), path.parent, (*chain, resolved))

    def add(self, file: PolicyFile, beside: Path, chain: tuple[Path, ...]) -> None:
        """Add a file after all files that it extends; these are looked up in the folder ``beside`` first."""
        for name, line in file.extends:
            path = _extended(beside, name)
            if not is_file(path) and composed(path) is None:
                file.mistake(line, f"extends {name!r}, but there is no file {shown(path)!r}{_suggest(path)}")
                continue
            resolved = path.resolve()
            if resolved in chain:
                circle = [*chain[chain.index(resolved) :], resolved]
                file.mistake(line, f"extends is circular: {' -> '.join(part.name for part in circle)}")
            elif len(chain) >= DEEPEST:
                file.mistake(
                    line, f"extends {name!r} is file {DEEPEST + 1} of a chain of extends; accepted: at most {DEEPEST}"
                )
            elif resolved not in self._seen:
                self.add_file(path, chain)
        self.merge.add(file)


def _extended(beside: Path, name: str) -> Path:
    """Return the file that ``name`` in ``extends`` means: one beside the extending file, else a shipped one."""
    near = beside / name
    shipped = folder() / (name if name.endswith(".toml") else f"{name}.toml")
    return shipped if not is_file(near) and (is_file(shipped) or composed(shipped) is not None) else near


def _suggest(path: Path) -> str:
    shipped = (*built_in_names(), *variant_names())
    files = {file.name for base in (path.parent, folder()) if is_folder(base) for file in base.glob("*.toml")}
    return nearest(path.name, files.union(shipped, (f"{name}.toml" for name in shipped)))
