"""``--format markdown``: for a pull request; long parts are collapsed."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fxamp.tools.common.formatting import plural
from fxamp.tools.common.table import printable
from fxamp.tools.diff.result import Comparison
from fxamp.tools.diff.words import op_rows, ops_counted, rule_rows, setting_rows, verdict

if TYPE_CHECKING:
    from fxamp.tools.diff.effect import Effect
    from fxamp.tools.diff.numbers import Numbers


def markdown_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the whole comparison."""
    yield f"### {code(comparison.old.about)} → {code(comparison.new.about)}"
    yield ""
    yield f"**{_capital(verdict(comparison))}.**"
    if settings := setting_rows(comparison):
        changes = [(code(sign), code(key), f"{code(old)} → {code(new)}") for sign, key, old, new in settings]
        yield ""
        yield from table(("", "setting", "change"), changes)
    if comparison.diff.rules:
        rows = [(code(sign), code(name), cell(text), code(where)) for sign, name, text, where in rule_rows(comparison)]
        yield ""
        yield from folded(plural(len(rows), "rule"), table(("", "rule", "change", "written at"), rows))
    if comparison.diff.ops:
        yield ""
        ops = [tuple(map(cell, row)) for row in op_rows(comparison)]
        title = f"{plural(ops_counted(comparison.diff.ops), 'op')} decided differently"
        yield from folded(title, table(("decision", "rule", "concerns"), ops))
    for effect in comparison.effects:
        yield ""
        yield from _effect(effect)
    for cost in comparison.costs:
        yield ""
        yield from cost.lines()
    for numbers in comparison.runs:
        yield ""
        yield from _numbers(numbers)


def _effect(effect: "Effect") -> Iterator[str]:
    from fxamp.tools.diff import effect_text

    yield f"**{cell(effect_text.title(effect))}**"
    sums = [(label, cell(text)) for label, text in effect_text.totals(effect)]
    if sums:
        yield ""
        yield from table(("", "old → new"), sums)
    for title, columns, rows in (
        ("ops", effect_text.OPS, effect_text.op_rows(effect)),
        ("modules", effect_text.MODULES, effect_text.module_rows(effect)),
    ):
        if rows:
            yield ""
            filled = [at for at in range(len(columns)) if any(row[at] for row in rows)]
            cells = (tuple(code(row[at]) for at in filled) for row in rows)
            yield from folded(f"{len(rows)} {title}", table([columns[at].title for at in filled], cells))


def _numbers(numbers: "Numbers") -> Iterator[str]:
    from fxamp.tools.diff.numbers_text import COLUMNS, error_rows, remarks

    yield f"**{cell(numbers.file)}**"
    yield ""
    rows = ((cell(name.strip()), old, new) for name, old, new in error_rows(numbers))
    yield from table([column.title for column in COLUMNS], rows)
    yield ""
    yield from map(cell, remarks(numbers))


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


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
