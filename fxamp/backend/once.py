"""Warnings that would repeat for every graph: each is logged once per process."""

import logging
from functools import cache


@cache
def warn_once(logger: str, message: str, *arguments: str) -> None:
    """Log ``message`` as a warning on the logger named ``logger``; logging formats it with ``arguments``."""
    logging.getLogger(logger).warning(message, *arguments)
