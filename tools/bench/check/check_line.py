"""A line of the report: a check, and its outcome."""

from collections.abc import Callable
from dataclasses import dataclass

OK, WRONG, SKIPPED = "ok", "not ok", "skipped"


class SkippedError(Exception):
    """The machine lacks what a check needs; the message says what."""


@dataclass(frozen=True)
class Check:
    """One line of the report.

    ``run`` returns its finding as a short text. It raises AssertionError if that is wrong, and SkippedError if the
    check cannot run here.
    """

    name: str
    run: Callable[[], str]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check: "ok", "not ok" or "skipped"; its finding, or why it is skipped; and its seconds."""

    name: str
    status: str
    detail: str
    seconds: float


def require(condition: object, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)
