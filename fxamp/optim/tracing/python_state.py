"""The Python state that a step can change besides its optimizer's: read it, compare it, and restore it in place."""

from collections import deque
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

from fxamp.optim.errors import NotCompilableError
from fxamp.optim.reading.fingerprint import PLAIN
from fxamp.optim.reading.reachable import reachable

_Contents = dict[Any, Any] | list[Any] | set[Any] | None


class PythonState:
    """The contents of each container and object that an optimizer holds, by reference, at one moment."""

    def __init__(self, *roots: Mapping[str, Any]) -> None:
        """``roots``: what the optimizer holds, by name.

        Raises:
            NotCompilableError: it holds an iterator, which can be neither compared nor restored.
        """
        self._before: list[tuple[str, Any, _Contents]] = []
        for name, value, direct in (held for root in roots for held in reachable(root)):
            if direct and isinstance(value, Iterator) and not hasattr(value, "__dict__"):
                raise NotCompilableError(f"its {name!r} holds an iterator, a {type(value).__name__}")
            self._before.append((name, value, _contents(value)))

    def restore(self) -> list[str]:
        """Restore the contents in place; return the names in the roots of what had others."""
        changed = [(name, value, old) for name, value, old in self._before if not alike(_contents(value), old)]
        for _, value, old in changed:
            _put_back(value, old)
        return [name for name, _, _ in changed]


def alike(one: Any, other: Any) -> bool:
    """Whether two values are the same object, or equal in every object that they hold."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, PLAIN):
        return bool(one == other)
    if isinstance(one, dict):
        return alike(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other) if isinstance(one, (set, frozenset)) else False


def _contents(value: Any) -> _Contents:
    """Return a copy of what can be replaced in ``value``; None if nothing can."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, deque)):
        return list(value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, (tuple, frozenset, MethodType)) or not hasattr(value, "__dict__"):
        return None
    return dict(vars(value))


def _put_back(value: Any, contents: Any) -> None:
    target = value if isinstance(value, (dict, list, deque, set)) else vars(value)
    target.clear()
    if isinstance(target, (list, deque)):
        target.extend(contents)
    else:
        target.update(contents)
