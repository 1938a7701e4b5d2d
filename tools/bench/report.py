"""What a subcommand measured, ready to print."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxamp.tools.common.command_line import Parser


@dataclass(frozen=True)
class Report:
    """One measurement.

    ``document``: JSON's values, as ``--json`` prints them. ``table`` and ``markdown``: the same as text. ``chart``: an
    SVG image, None where there is nothing to draw. ``failed``: the names of what did not work, which make the command's
    status 1.
    """

    document: Mapping[str, Any]
    table: str
    markdown: str
    chart: str | None = None
    failed: tuple[str, ...] = ()

    @property
    def json(self) -> str:
        """The document as indented JSON."""
        return json.dumps(self.document, indent=2)

    def text(self, given: argparse.Namespace) -> str:
        """Return what to print for the options of :func:`add_styles`."""
        if given.json:
            return self.json
        return self.markdown if given.markdown else self.table


def add_styles(parser: Parser) -> None:
    """Add ``--json`` and ``--markdown``, which exclude each other."""
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    style.add_argument("--markdown", action="store_true", help="print the table as Markdown")
