"""Output properties: its width, and whether it has colours."""

import os
import shutil
from dataclasses import dataclass
from typing import TextIO

#: ANSI colours by dtype: 16 bits and less cyan, float32 yellow, float64 red.
_COLOURS = {"f16": "36", "bf16": "36", "f32": "33", "f64": "31"}
_CAST = "35"

#: A regular expression for the codes that tools write for colours: one is red, green, yellow, ... cyan, 0 none.
COLOURED = r"\x1b\[(?:0|3[1-6])m"


@dataclass(frozen=True)
class Look:
    """``width``: the terminal's columns, None for text that is never shortened; ``colour``: whether to use colours."""

    width: int | None = None
    colour: bool = False

    def dtype(self, name: str, text: str) -> str:
        """Return ``text`` in the colour of the dtype ``name``."""
        return self.paint(text, _COLOURS.get(name, ""))

    def cast(self, text: str) -> str:
        """Return ``text`` in the colour of casts."""
        return self.paint(text, _CAST)

    def paint(self, text: str, code: str) -> str:
        """Return ``text`` in the colour of an ANSI ``code``; as it is for ``""``, or without colours."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and code else text


def look_of(stream: TextIO | None, width: int | None = None, to_file: bool = False) -> Look:
    """Return the look for ``stream``: no limit for pipes and files, else the terminal's width; ``width`` overrides."""
    if to_file or stream is None:
        return Look(width)
    if width is None and stream.isatty():
        width = shutil.get_terminal_size().columns
    return Look(width, is_colourful(stream))


def is_colourful(stream: TextIO) -> bool:
    """Return whether a stream gets colours.

    Tests in the order of CPython's ``_colorize.can_colorize``: NO_COLOR, FORCE_COLOR, TERM=dumb, then the stream.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and stream.isatty()
