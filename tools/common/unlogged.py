"""Silence warnings that a tool causes repeatedly and reports itself."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unlogged(name: str) -> Iterator[None]:
    """Within the block, the logger ``name`` (such as ``"fxamp.optim"``) emits only errors."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
