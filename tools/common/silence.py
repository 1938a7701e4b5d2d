"""Silence log messages that a tool reports itself, and convert its exceptions to one-line errors of the tool."""

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator

from fxamp.errors import FxampError, ListingError

_LOGS = ("torch._dynamo", "torch._subclasses", "torch.export", "torch.fx")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's log messages about graph breaks and errors; listings and errors report them instead."""
    with _logging_from(logging.CRITICAL + 1, *_LOGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def unlogged() -> contextlib.AbstractContextManager[None]:
    """Within the block, fxamp logs only errors."""
    return _logging_from(logging.ERROR, "fxamp")


@contextlib.contextmanager
def _logging_from(level: int, *names: str) -> Iterator[None]:
    logs = [logging.getLogger(name) for name in names]
    before = [log.level for log in logs]
    for log in logs:
        log.setLevel(level)
    try:
        yield
    finally:
        for log, own in zip(logs, before, strict=True):
            log.setLevel(own)


@contextlib.contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Convert an error that torch raises inside to a ListingError: ``what``, its type, its message's first line."""
    try:
        yield
    except FxampError:
        raise
    except Exception as error:
        raise ListingError(f"{what}: {one_line(error)}") from error


#: How Dynamo words an error that an op raised while it traced.
_OF_AN_OP = re.compile(r"FX node with fake tensors.* got (\w+\(.*\))")


def one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message; of Dynamo's errors, the one that an op raised."""
    text = str(error)
    inner = _OF_AN_OP.search(text)
    if inner is not None:
        return inner[1]
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__
