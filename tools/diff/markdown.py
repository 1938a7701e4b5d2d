"""``--format markdown``: for a pull request; long parts are collapsed."""

from collections.abc import Iterable, Iterator, Sequence

from fxamp.tools.common.table import printable
from fxamp.tools.diff.document import parts
from fxamp.tools.diff.part import Part
from fxamp.tools.diff.result import Comparison
from fxamp.tools.diff.words import summary


def markdown_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the whole comparison."""
    text = summary(comparison)
    yield f"### {code(comparison.old.about)} → {code(comparison.new.about)}"
    yield ""
    yield f"**{text[:1].upper()}{text[1:]}.**"
    for part in parts(comparison):
        yield ""
        yield from _part(part)


def _part(part: Part) -> Iterator[str]:
    if part.title and not part.rows:
        yield f"**{cell(part.title)}**"
    if part.rows:
        names, rows = part.columns_with_text()
        written = (
            [cell(text.strip()) if name in part.prose else code(text) for name, text in zip(names, row, strict=True)]
            for row in rows
        )
        yield from folded(part.title, table(names, written)) if part.folds else table(names, written)
    if part.rows and part.remarks:
        yield ""
    yield from part.remarks if part.verbatim else map(cell, part.remarks)


def folded(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield ``lines`` in a collapsed section; GitHub and GitLab need the empty lines to render Markdown in it."""
    yield f"<details><summary>{cell(title)}</summary>"
    yield ""
    yield from lines
    yield ""
    yield "</details>"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table of cells from :func:`cell` or :func:`code`."""
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def cell(text: str) -> str:
    """Return ``text`` as one cell of plain text in Markdown, with all markup escaped."""
    escaped = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{char}" if char in "\\`*_|[]~" else char for char in escaped)


def code(text: str) -> str:
    """Return ``text`` formatted as code; ``""`` for empty text."""
    inside = printable(text).replace("|", "\\|")
    fence = "``" if "`" in inside else "`"
    return f"{fence}{inside}{fence}" if inside else ""
