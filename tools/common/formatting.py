"""Format files, ops, dtypes, rules and bytes for people."""

import os
from functools import lru_cache
from pathlib import PurePath

from fxamp.graph_text.model import Entry, RuleRef, Source, short_op
from fxamp.graph_text.totals import Totals

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def op_name(entry: Entry) -> str:
    """Return the op's short name: ``"mm"`` for ``"aten::mm.default"``; ``"cast"`` for an inserted cast."""
    if entry.is_cast:
        return "cast"
    return short_op(entry.target).removeprefix("higher_order::")


def overruled(entry: Entry) -> str:
    """Return why the op's rule was not applied as it is, or a product is not in fp8; ``""`` if neither."""
    return entry.overruled or (entry.not_fp8 and f"not in fp8: {entry.not_fp8}")


def place(source: Source | None) -> str:
    """Return ``file:line``, with the file as in :func:`short_file`; ``""`` if unknown."""
    return f"{short_file(source.file)}:{source.line}" if source is not None else ""


@lru_cache(maxsize=4096)
def short_file(file: str) -> str:
    """Return a path relative to the working directory; for an installed package, starting at the package."""
    parts = PurePath(file).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return str(PurePath(*parts[parts.index(folder) + 1 :]))
    inside = file.removeprefix(os.getcwd() + os.sep)  # noqa: PTH109 (a prefix of the text: nothing is resolved)
    return inside or file


def rule_name(rule: RuleRef | None) -> str:
    """Return ``id file:line``; ``""`` for None."""
    return "" if rule is None else f"{rule.id} {rule.origin}".rstrip()


def size(count: int) -> str:
    """Return a number of bytes with its unit: ``"512 B"``, ``"1.5 KiB"``."""
    value, unit = float(count), _UNITS[0]
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def size_or(count: int | None, unknown: str) -> str:
    """Return :func:`size`, or ``unknown`` for None."""
    return unknown if count is None else size(count)


def bytes_cast(sums: Totals) -> str:
    """Return the bytes that casts read and write; ``"at least"`` or ``"unknown"`` where sizes are not known."""
    if sums.casts_of_unknown_size == 0:
        return size(sums.cast_bytes)
    return "unknown" if sums.casts_of_unknown_size == sums.casts else f"at least {size(sums.cast_bytes)}"


def counted(counts: dict[str, int]) -> str:
    """Return ``{"bf16": 3, "f32": 1}`` as ``"bf16 3, f32 1"``."""
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def plural(count: int, one: str, more: str = "") -> str:
    """Return a count with its noun: ``"1 cast"``, ``"2 casts"``, ``"2 batches"`` with ``more``."""
    return f"{count} {one if count == 1 else more or one + 's'}"
