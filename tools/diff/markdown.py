"""``--format markdown``: for a pull request; long parts are collapsed."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fxamp.tools.common.table import printable
from fxamp.tools.common.words import plural
from fxamp.tools.diff.result import Found
from fxamp.tools.diff.words import SIGNS, groups, ops_counted, rule_text, value, verdict, written_at

if TYPE_CHECKING:
    from fxamp.tools.diff.effect import Effect
    from fxamp.tools.diff.numbers import Numbers


def markdown_lines(found: Found) -> Iterator[str]:
    """Yield the lines of the whole comparison."""
    yield f"### {code(found.old.about)} → {code(found.new.about)}"
    yield ""
    yield f"**{_capital(verdict(found))}.**"
    marked = [("~", code(change.key), _pair(change.old, change.new)) for change in found.settings]
    marked += [("!", code(f"loss_scale.{c.key}"), _pair(c.old, c.new)) for c in found.loss_scale]
    if marked:
        yield ""
        yield from table(("", "setting", "change"), [(code(sign), key, text) for sign, key, text in marked])
    if found.diff.rules:
        rows = [(code(SIGNS[c.kind]), code(c.id), cell(rule_text(c)), code(written_at(c))) for c in found.diff.rules]
        yield ""
        yield from folded(plural(len(rows), "rule"), table(("", "rule", "change", "written at"), rows))
    if found.diff.ops:
        yield ""
        yield from folded(f"{plural(ops_counted(found.diff.ops), 'op')} decided differently", _ops(found))
    for effect in found.effects:
        yield ""
        yield from _effect(effect)
    for cost in found.costs:
        yield ""
        yield from cost.lines()
    for numbers in found.runs:
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


def _ops(found: Found) -> Iterator[str]:
    rows = [
        (cell(group.heading) if at == 0 else "", cell(label), cell(", ".join(items)))
        for group in groups(found.diff.ops)
        for at, (label, items) in enumerate(group.lines)
    ]
    return table(("decision", "rule", "concerns"), rows)


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
    shown = printable(text).replace("|", "\\|")
    fence = "``" if "`" in shown else "`"
    return f"{fence}{shown}{fence}" if shown else ""


def _pair(old: object, new: object) -> str:
    return f"{code(value(old))} → {code(value(new))}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
