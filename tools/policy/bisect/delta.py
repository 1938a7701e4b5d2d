"""Delta debugging: find a minimal set that passes a test, in few trials.

The algorithm is ddmin of Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (2002), and for
trees the hierarchical one of Misherghi and Su, "HDD" (2006): coarse units are minimized first, then the remaining ones
are split into their parts. The test need not be monotonic: a larger set may fail where a smaller one passes.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

#: Whether a set of units, in the order of all units, passes.
Test = Callable[[tuple[T, ...]], bool]


def ddmin(units: Sequence[T], passes: Test[T]) -> tuple[T, ...]:
    """Return a subset of ``units``, in order, that passes and is 1-minimal: it fails without any one of its units.

    ``units`` themselves must pass; they are not tried again. ``passes`` is called more than once for the same set, so
    it should cache its results.
    """
    current = tuple(units)
    if current and passes(()):
        return ()
    parts = 2
    while len(current) > 1:
        chunks = _split(current, min(parts, len(current)))
        subset = next((chunk for chunk in chunks if passes(chunk)), None)
        if subset is not None:
            current, parts = subset, 2
            continue
        rests = (tuple(unit for other in chunks if other is not chunk for unit in other) for chunk in chunks)
        subset = next((rest for rest in rests if passes(rest)), None)
        if subset is not None:
            current, parts = subset, max(parts - 1, 2)
            continue
        if parts >= len(current):
            break
        parts = min(2 * parts, len(current))
    return current


def hierarchical(roots: Sequence[T], parts_of: Callable[[T], Sequence[T]], passes: Test[T]) -> tuple[T, ...]:
    """Return a set of units without parts that passes and is 1-minimal, by minimizing level by level.

    ``roots`` must pass. If a passing set fails after a unit is replaced by its parts, the unit stays whole. A unit
    without parts is final.
    """
    current = ddmin(roots, passes)
    while True:
        finer = _finer(current, parts_of, passes)
        if finer == current:
            return current
        current = ddmin(finer, passes)


def _finer(current: tuple[T, ...], parts_of: Callable[[T], Sequence[T]], passes: Test[T]) -> tuple[T, ...]:
    """Return ``current`` with every unit replaced by its parts; one by one, if replacing all of them fails."""
    split = tuple(part for unit in current for part in (parts_of(unit) or (unit,)))
    if split == current or passes(split):
        return split
    for at, unit in enumerate(current):
        one = (*current[:at], *(parts_of(unit) or (unit,)), *current[at + 1 :])
        if one != current and passes(one):
            return one
    return current


def is_minimal(units: Sequence[T], passes: Test[T]) -> bool:
    """Whether ``units`` pass, and fail without any one of them."""
    every = tuple(units)
    return passes(every) and not any(passes(every[:at] + every[at + 1 :]) for at in range(len(every)))


def _split(units: tuple[T, ...], parts: int) -> list[tuple[T, ...]]:
    """Return ``units`` split into ``parts`` consecutive parts of nearly equal length, none empty."""
    bounds = [len(units) * at // parts for at in range(parts + 1)]
    return [units[low:high] for low, high in pairwise(bounds)]
