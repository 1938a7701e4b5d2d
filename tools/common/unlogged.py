"""Warnings of a part of fxamp that a tool causes again and again, and tells in its own way."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unlogged(name: str) -> Iterator[None]:
    """Let the logger ``name``, ``"fxamp.optim"`` say, pass nothing below an error within the block."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
