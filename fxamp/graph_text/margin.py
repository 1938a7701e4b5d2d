"""Read a graph's comments: the user's source line and fxamp's fields for each statement."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from fxamp.graph_text.comments import PREFIX, read_comment
from fxamp.graph_text.fields import Fields
from fxamp.graph_text.model import Source

#: An annotation, a note about recomputation, or "Backward of forward node:" may come before the location.
_FILE = re.compile(r"#.*? File: (.*?):(\d{1,18}) in (.*?), code: ?(.*)")


class Note(NamedTuple):
    """The content of the comments above a statement."""

    source: Source | None
    fields: Fields


@dataclass
class Margin:
    """Notes by the line number of their statement; notes of inputs by the line of ``def forward`` and their name.

    ``broken``: the line number and the mistake of each fxamp comment that cannot be read.
    """

    lines: dict[int, Note] = field(default_factory=dict)
    inputs: dict[tuple[int, str], Fields] = field(default_factory=dict)
    broken: list[tuple[int, str]] = field(default_factory=list)


def read_margin(lines: list[str], ours: bool) -> Margin:
    """Read the comments of a class's ``lines``, numbered from 1.

    torch's source comments apply to all statements up to the next one; fxamp's (``ours``) to the next statement.
    """
    margin = Margin()
    source: Source | None = None
    fields: Fields = []
    inputs: dict[str, Fields] = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text.startswith("#"):
            if text.startswith(PREFIX):
                entry_fields = _fields(text, number, margin)
                if entry_fields and entry_fields[0][0] == "input":
                    inputs[entry_fields[0][1]] = entry_fields
                else:
                    fields = entry_fields
            elif " File: " in text:
                source = _source(text)
            elif "No stacktrace found" in text:
                source = None
            continue
        if not text or (not ours and text.startswith("return")):
            continue  # torch writes no comment for the return statement
        if text.startswith(("def ", "class ")):
            margin.inputs |= {(number, name): comment for name, comment in inputs.items()}
            source, fields, inputs = None, [], {}
            continue
        if source is not None or fields:
            margin.lines[number] = Note(source, fields)
        fields = []
        source = None if ours else source
    return margin


def _fields(text: str, number: int, margin: Margin) -> Fields:
    """Return the fields of a comment; for an unreadable one record the mistake and return none."""
    try:
        return read_comment(text)
    except ValueError as error:
        margin.broken.append((number, str(error)))
        return []


def _source(text: str) -> Source | None:
    match = _FILE.match(text)
    return Source(match[1], int(match[2]), match[3], match[4].strip()) if match else None
