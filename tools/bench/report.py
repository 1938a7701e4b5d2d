"""What a subcommand measured, ready to print, and the options that all subcommands share."""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from fxamp.errors import OptionError
from fxamp.tools.common.command_line import Parser, one_of


@dataclass(frozen=True)
class Report:
    """One measurement.

    ``document``: JSON's values, as ``--json`` prints them. ``table`` and ``markdown``: the same as text. ``failed``:
    the names of what did not work, which make the command's status 1.
    """

    document: Mapping[str, Any]
    table: str
    markdown: str
    failed: tuple[str, ...] = ()

    def text(self, options: argparse.Namespace) -> str:
        """Return what to print for the options of :func:`add_styles`."""
        if options.json:
            return json.dumps(self.document, indent=2)
        return self.markdown if options.markdown else self.table


@dataclass(frozen=True)
class Spread:
    """A sample's median and its quartiles."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles (inclusive method: those of the sample itself) of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, middle, high)


def drawn(cells: Sequence[Sequence[Any]], headers: Sequence[str], markdown: bool) -> str:
    """Return a table for a terminal, or in Markdown."""
    return tabulate(cells, headers, tablefmt="github" if markdown else "simple", disable_numparse=True)


def add_styles(parser: Parser) -> None:
    """Add ``--json`` and ``--markdown``, which exclude each other."""
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    style.add_argument("--markdown", action="store_true", help="print the table as Markdown")


def require_device(device: str) -> None:
    """Raise OptionError where torch cannot use the device of ``--device``, "cpu" or "cuda"."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: this machine has no CUDA device that torch can use; accepted here: cpu")


def some_of(*accepted: str) -> Callable[[str], tuple[str, ...]]:
    """Return an argparse ``type``: some of ``accepted`` with commas between them, each once."""
    check = one_of(*accepted)
    return lambda text: tuple(dict.fromkeys(check(part.strip()) for part in text.split(",")))
