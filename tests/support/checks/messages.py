"""What fxamp logs, collected without a fixture: on a rank, or in a run that is cached."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def said_by_fxamp(level: int = logging.NOTSET) -> Iterator[list[str]]:
    """What fxamp logs within the block, from ``level`` on."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fxamp").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("fxamp").removeHandler(handler)
