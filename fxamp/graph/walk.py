"""Walk a graph of any kind: fx nodes, autograd's nodes, positions."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def reached(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield ``starts`` and what is reached from them, each once; ``following`` returns what follows something."""
    waiting, seen = [*starts], set[T]()
    while waiting:
        place = waiting.pop()
        if place not in seen:
            seen.add(place)
            yield place
            waiting += following(place)
