"""Totals and sorting of what a graph's forward keeps for its backward."""

from collections.abc import Iterable

from fxamp.listing.model import KeptValue


def total(sizes: Iterable[int | None]) -> int | None:
    """Return the sum; None if one of ``sizes`` is unknown."""
    every = list(sizes)
    known = [size for size in every if size is not None]
    return sum(known) if len(known) == len(every) else None


def totals_of(values: Iterable[KeptValue]) -> tuple[int | None, int | None]:
    """Return the bytes of all ``values`` before and after; None if unknown."""
    listed = list(values)
    return total(value.before for value in listed), total(value.after for value in listed)


def largest_first(values: Iterable[KeptValue]) -> list[KeptValue]:
    """Return ``values`` sorted by their bytes after, then by their bytes before, the largest first."""
    return sorted(values, key=lambda value: (-(value.after or 0), -(value.before or 0)))
