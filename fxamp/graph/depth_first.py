"""Visit the nodes of a graph of any kind: fx nodes, autograd's nodes, positions."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def depth_first(starts: Iterable[T], successors: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield ``starts`` and what is reachable from them, depth first, each once."""
    waiting, seen = [*starts], set[T]()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += successors(node)
