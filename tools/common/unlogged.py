"""Silences warnings that a tool causes repeatedly and reports in its own way."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unlogged(name: str) -> Iterator[None]:
    """Within the block, the logger ``name`` (such as ``"fxamp.optim"``) passes only errors."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
