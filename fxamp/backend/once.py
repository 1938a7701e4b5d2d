"""Warnings that every graph would repeat: each is logged once in a process."""

import logging
from functools import cache


@cache
def warn_once(logger: str, message: str, *arguments: str) -> None:
    """Log ``message`` as a warning of the logger of this name, with ``arguments`` as logging formats them."""
    logging.getLogger(logger).warning(message, *arguments)
