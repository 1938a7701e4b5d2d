"""What a graph's forward keeps for its backward: totals, and the order of size."""

from collections.abc import Iterable

from fxamp.listing.model import KeptValue


def total(sizes: Iterable[int | None]) -> int | None:
    """The sum, None if one of ``sizes`` is not known."""
    every = list(sizes)
    known = [size for size in every if size is not None]
    return sum(known) if len(known) == len(every) else None


def totals_of(values: Iterable[KeptValue]) -> tuple[int | None, int | None]:
    """The bytes of all ``values`` before and after, None for what is not known."""
    listed = list(values)
    return total(value.before for value in listed), total(value.after for value in listed)


def largest_first(values: Iterable[KeptValue]) -> list[KeptValue]:
    """``values`` by the bytes that they take, then by those that they would."""
    return sorted(values, key=lambda value: (-(value.after or 0), -(value.before or 0)))
