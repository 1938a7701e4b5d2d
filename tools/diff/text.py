"""``--format text``: marked lines for settings and rules, the ops that are decided differently, and tables."""

import textwrap
from collections.abc import Iterator, Sequence

from fxamp.tools.common.columns import painter
from fxamp.tools.common.table import labelled, printable, render
from fxamp.tools.common.terminal import Look
from fxamp.tools.diff.document import parts
from fxamp.tools.diff.part import Cells, Part
from fxamp.tools.diff.result import Comparison
from fxamp.tools.diff.words import summary

#: ANSI colours of the marks.
_COLOURS = {"+": "32", "-": "31", "~": "33", "!": "35"}

#: The width of lists if there is no terminal.
_WIDTH = 120

_INDENT = "    "


def text_lines(comparison: Comparison, look: Look) -> Iterator[str]:
    """Yield the lines of the whole comparison."""
    yield printable(f"--- {comparison.old.about}")
    yield printable(f"+++ {comparison.new.about}")
    for part in parts(comparison):
        yield ""
        yield from _part(part, look)
    yield ""
    yield summary(comparison)


def _part(part: Part, look: Look) -> Iterator[str]:
    name, line = part.shape
    if part.title and not (part.rows and name == "table"):
        yield printable(part.title)
    if name == "marks":
        longest = max(len(row[1]) for row in part.rows)
        for sign, label, *cells in part.rows:
            yield from _marked(sign, f"{label:<{longest}}", line(*cells), look)
    elif name == "groups":
        yield from _groups(part.rows, look)
    elif name == "facts":
        yield from labelled([(label, line(*cells)) for label, *cells in part.rows], look.width)
    elif part.rows:
        rows = [tuple(map(printable, row)) for row in part.rows]
        yield from render(part.layout, rows, look.width, painter(look, *part.layout.dtypes))
    if part.rows and part.remarks:
        yield ""
    yield from part.remarks if part.verbatim else map(printable, part.remarks)


def _groups(rows: Sequence[Cells], look: Look) -> Iterator[str]:
    """Yield each heading, and below it the labels of its rows with their texts."""
    starts = [at for at, row in enumerate(rows) if row[0]]
    for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        yield from _wrapped("  ", rows[start][0], look, more=_INDENT)
        longest = max(len(label) for _, label, _ in rows[start:end])
        for _, label, items in rows[start:end]:
            yield from _wrapped(f"{_INDENT}{label:<{longest}}  ", items, look)


def _marked(sign: str, label: str, text: str, look: Look) -> Iterator[str]:
    first, *rest = _wrapped(f"{sign} {label}  ", text, look)
    end = len(label) + 2
    yield look.paint(first[:end], _COLOURS[sign]) + first[end:]
    yield from rest


def _wrapped(label: str, text: str, look: Look, more: str | None = None) -> list[str]:
    """Return ``text`` after ``label``, wrapped; later lines are indented by ``more``, or to the width of ``label``."""
    width = look.width or _WIDTH
    longest = max(map(len, text.split()), default=0)
    if len(label) > len(_INDENT) * 2 and len(label) + longest > width:
        return [label.rstrip(), *_wrapped(_INDENT * 2, text, look)]
    lines = textwrap.wrap(
        printable(text),
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label) if more is None else more,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [label.rstrip()]
