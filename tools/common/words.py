"""How files, ops, dtypes, rules and bytes are written for a person."""

import os
from functools import lru_cache
from pathlib import PurePath

from fxamp.listing.model import Entry, RuleRef, Source

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def op_name(entry: Entry) -> str:
    """The op without what goes without saying: ``"aten::mm.default"`` as ``"mm"``; an inserted cast is ``"cast"``."""
    if entry.is_cast:
        return "cast"
    return entry.target.removeprefix("aten::").removeprefix("higher_order::").removesuffix(".default")


def place(source: Source | None) -> str:
    """``file:line``, the file as :func:`short_file` writes it; ``""`` if unknown."""
    return f"{short_file(source.file)}:{source.line}" if source is not None else ""


@lru_cache(maxsize=4096)
def short_file(file: str) -> str:
    """A file below the working directory relative to it; an installed package's from the package on."""
    parts = PurePath(file).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return str(PurePath(*parts[parts.index(folder) + 1 :]))
    inside = file.removeprefix(os.getcwd() + os.sep)  # noqa: PTH109 (a prefix of the text: nothing is resolved)
    return inside or file


def rule_name(rule: RuleRef | None) -> str:
    """``id file:line``; ``""`` for none."""
    return "" if rule is None else f"{rule.id} {rule.origin}".rstrip()


def size(count: int) -> str:
    """A number of bytes with its unit: ``"512 B"``, ``"1.5 KiB"``."""
    value, unit = float(count), _UNITS[0]
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def counted(counts: dict[str, int]) -> str:
    """``{"bf16": 3, "f32": 1}`` as ``"bf16 3, f32 1"``."""
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def plural(count: int, one: str) -> str:
    """``1 cast``, ``2 casts``."""
    return f"{count} {one}{'' if count == 1 else 's'}"
