"""Find a name that two globs both match."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

ANY = "…"
"""Stands for any text in the names of :func:`common_name`; no op or module has it in its name."""

_TOKEN = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)

State = tuple[int, int]


def common_name(first: str, second: str) -> str | None:
    """Return a name that both globs match, None if there is none.

    Where both globs accept any text, the name has :data:`ANY`, so that other globs rarely match it by accident.
    """
    pair = _tokens(first), _tokens(second)
    return _search(*map(_open, pair)) or _search(*pair)


def _tokens(glob: str) -> list[str]:
    return _TOKEN.findall(glob)


def _open(tokens: list[str]) -> list[str]:
    """Return the tokens of the glob with every ``*`` made to match at least :data:`ANY`."""
    return [part for token in tokens for part in (("*", ANY, "*") if token == "*" else (token,))]


def _search(first: list[str], second: list[str]) -> str | None:
    """Search both token lists together, breadth first; the path to the end of both spells the name."""
    letters = sorted({*"".join(first), *"".join(second), ANY})
    ways: dict[State, str] = {(0, 0): ""}
    queue = [(0, 0)]
    for state in queue:
        if state == (len(first), len(second)):
            return ways[state]
        for letter, after in _steps(first, second, state, letters):
            if after not in ways:
                ways[after] = ways[state] + letter
                queue.append(after)
    return None


def _steps(first: list[str], second: list[str], state: State, letters: list[str]) -> Iterator[tuple[str, State]]:
    """Yield the steps from a pair of positions: skip a ``*``, or consume one letter that both match."""
    one, other = state
    if one < len(first) and first[one] == "*":
        yield "", (one + 1, other)
    if other < len(second) and second[other] == "*":
        yield "", (one, other + 1)
    if one == len(first) or other == len(second):
        return
    for letter in letters:
        if fnmatchcase(letter, first[one]) and fnmatchcase(letter, second[other]):
            yield letter, (one + (first[one] != "*"), other + (second[other] != "*"))
