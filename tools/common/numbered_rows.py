"""Combine rows that differ only in the numbers of their modules: ``h.*.attn`` for ``h.0.attn`` .. ``h.11.attn``."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Group(Generic[T]):
    """``items`` that say the same, and their modules as one glob."""

    items: tuple[T, ...]
    module: str

    @property
    def first(self) -> T:
        """Return the item to show."""
        return self.items[0]

    @property
    def count(self) -> int:
        """Return the number of items."""
        return len(self.items)


def combined(items: Iterable[T], module: Callable[[T], str], content: Callable[[T], Hashable]) -> list[Group[T]]:
    """Return ``items`` in groups of equal ``content``, whose modules differ in numbers only; in order of the firsts."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        without_numbers = tuple("*" if part.isdecimal() else part for part in module(item).split("."))
        groups.setdefault((without_numbers, content(item)), []).append(item)
    return [Group(tuple(group), glob([module(item) for item in group])) for group in groups.values()]


def glob(modules: Sequence[str]) -> str:
    """Return one path for modules that differ in numbers only, with ``*`` for each part that differs."""
    parts = zip(*(module.split(".") for module in modules), strict=True)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)
