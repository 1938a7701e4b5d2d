"""Warnings that would repeat for every graph: each is logged once per process."""

import logging
from dataclasses import dataclass, field
from functools import cache


@dataclass(frozen=True)
class Example:
    """Text in a warning, such as one graph of many, that does not make it another warning."""

    text: str = field(compare=False)

    def __str__(self) -> str:
        return self.text


@cache
def warn_once(logger: str, message: str, *arguments: str | Example) -> None:
    """Log ``message`` as a warning on the logger named ``logger``; logging formats it with ``arguments``."""
    logging.getLogger(logger).warning(message, *arguments)
