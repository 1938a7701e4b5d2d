"""A line of the answer: a check, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass

OK, WRONG, SKIPPED = "ok", "not ok", "skipped"


class SkippedError(Exception):
    """The machine lacks what a check needs; the message says what."""


@dataclass(frozen=True)
class Check:
    """One line of the answer.

    ``run`` returns what was seen, as a short text. It raises AssertionError where that is wrong, and SkippedError where
    the check cannot be made here.
    """

    name: str
    run: Callable[[], str]


@dataclass(frozen=True)
class Outcome:
    """What came of a check: "ok", "not ok" or "skipped"; what was seen, or why it is skipped; and its seconds."""

    name: str
    status: str
    detail: str
    seconds: float


def require(condition: object, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)
