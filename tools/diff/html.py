"""``--format html``: one self-contained page without scripts, with both policies side by side on every graph."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fxamp.listing.totals import Totals
from fxamp.tools.common.formatting import bytes_cast, counted, plural, size, size_or
from fxamp.tools.common.page import colour, colours, escaped
from fxamp.tools.common.table import printable
from fxamp.tools.diff.result import Comparison
from fxamp.tools.diff.sides import Side
from fxamp.tools.diff.words import op_rows, ops_counted, rule_rows, setting_rows, verdict

if TYPE_CHECKING:
    from fxamp.tools.diff.effect import Effect
    from fxamp.tools.diff.numbers import Numbers
    from fxamp.tools.diff.side_by_side import Cell, Module, Row

_STYLE = Path(__file__).with_name("page.css")


def html_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the page."""
    title = _text(f"{comparison.old.policy.name} → {comparison.new.policy.name}")
    style = colours() + _STYLE.read_text(encoding="utf-8")
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title} - fxamp-diff</title>\n<style>{style}</style>\n</head>\n<body>"
    yield f"<header><h1>{title}</h1><p>{_text(verdict(comparison))}</p>"
    if comparison.effects:
        yield '<label><input type="checkbox" id="all"> what is the same, too</label>'
    yield "</header>\n<main>"
    yield from _settings(comparison)
    for effect in comparison.effects:
        yield from _effect(effect, comparison)
    for cost in comparison.costs:
        yield from _section(cost.file, ["<pre>", *map(_text, cost.lines()), "</pre>"])
    for numbers in comparison.runs:
        yield from _numbers(numbers)
    yield from _rules(comparison)
    yield "</main>\n</body>\n</html>"


def _settings(comparison: Comparison) -> Iterator[str]:
    rows = [("policy", _about(comparison.old), _about(comparison.new))]
    rows += [(key, _text(old), _text(new)) for _, key, old, new in setting_rows(comparison)]
    yield from _section("", _table(("", "old", "new"), rows))


def _about(side: Side) -> str:
    return f"<b>{_text(side.policy.name)}</b> {_text(side.about.removeprefix(side.policy.name).lstrip(' ,'))}"


def _rules(comparison: Comparison) -> Iterator[str]:
    if rows := rule_rows(comparison):
        yield from _section("Rules", _table(("", "rule", "change", "written at"), _texts(rows)))
    if ops := op_rows(comparison):
        title = f"{plural(ops_counted(comparison.diff.ops), 'op')} decided differently"
        yield from _section(title, _table(("decision", "rule", "concerns"), _texts(ops)))


def _effect(effect: "Effect", comparison: Comparison) -> Iterator[str]:
    from fxamp.tools.diff.effect_text import title
    from fxamp.tools.diff.side_by_side import modules

    yield from _section(title(effect), _totals(effect))
    if effect.listings is None:
        return
    all_modules = modules(*effect.listings)
    yield f'<section class="{_differs(any(module.differs for module in all_modules))}">'
    names = "".join(f"<span>{_text(side.policy.name)}</span>" for side in (comparison.old, comparison.new))
    yield f'<div class="row head"><span>module</span>{names}</div>'
    for module in all_modules:
        yield from _module(module)
    yield "</section>"


def _totals(effect: "Effect") -> list[str]:
    if effect.sums is None:
        return []
    lines: list[tuple[str, Callable[[Totals], str]]] = [
        ("ops", lambda sums: _bar(sums.ops_by_dtype) + _text(counted(dict(sums.ops_by_dtype)))),
        ("casts", lambda sums: str(sums.casts)),
        ("bytes cast per step", lambda sums: _text(bytes_cast(sums))),
    ]
    rows = [(label, *map(cell, effect.sums)) for label, cell in lines]
    rows.append(("kept for the backward", *(_text(size_or(kept, "unknown")) for kept in effect.kept)))
    return list(_table(("", "old", "new"), rows))


def _module(module: "Module") -> Iterator[str]:
    name = module.path or "(root)"
    times = f" <b>&times; {module.count}</b>" if module.count > 1 else ""
    kind = f' <span class="faint">{_text(module.module_class)}</span>' if module.module_class else ""
    sides = zip(module.sums, module.kept, strict=True)
    cells = "".join(f"<span>{_side(sums, kept)}</span>" for sums, kept in sides)
    yield f'<details class="{_differs(module.differs)}"><summary class="row"><span>{_text(name)}{times}{kind}</span>'
    yield f"{cells}</summary>"
    for row in module.rows:
        yield from _row(row)
    yield "</details>"


def _side(sums: Totals, kept: int | None) -> str:
    notes = [plural(sums.casts, "cast"), bytes_cast(sums)] if sums.casts else []
    notes += [f"keeps {size(kept)}"] if kept else []
    return _bar(sums.ops_by_dtype) + _text(", ".join([counted(dict(sums.ops_by_dtype)), *notes]))


def _row(row: "Row") -> Iterator[str]:
    yield f'<div class="row op {_differs(row.differs)}"><span>{_text(row.name)} <i>{_text(row.op)}</i>'
    yield f'<span class="faint">{_text(row.source)}</span></span>{_cell(row.old)}{_cell(row.new)}</div>'


def _cell(cell: "Cell | None") -> str:
    if cell is None:
        return '<span class="faint">not in this graph</span>'
    chip = f'<b class="dtype" style="background:{colour(cell.dtype)}">{_text(cell.dtype or "-")}</b>'
    rule = f'<span title="{_text(cell.at)}">{_text(cell.rule)}</span>' if cell.rule else ""
    casts = "".join(f'<span class="cast">{_text(cast)}</span>' for cast in cell.casts)
    return f'<span title="{_text(cell.reason)}">{chip} {rule} {casts}</span>'


def _numbers(numbers: "Numbers") -> Iterator[str]:
    from fxamp.tools.diff.numbers_text import COLUMNS, error_rows, remarks

    table = _table([column.title for column in COLUMNS], _texts(error_rows(numbers)))
    yield from _section(numbers.file, [*table, *(f"<p>{_text(remark)}</p>" for remark in remarks(numbers))])


def _bar(counts: Mapping[str, int]) -> str:
    """Return a bar with a part for each dtype, as wide as its share of the ops."""
    all_ops = sum(counts.values())
    parts = (
        f'<i style="background:{colour(dtype)};width:{100 * count / all_ops:.1f}%"></i>'
        for dtype, count in counts.items()
    )
    return f'<span class="bar">{"".join(parts)}</span>' if all_ops else ""


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield "<section>"
    if title:
        yield f"<h2>{_text(title)}</h2>"
    yield from lines
    yield "</section>"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table of cells that are HTML."""
    yield f"<table><tr>{''.join(f'<th>{_text(title)}</th>' for title in titles)}</tr>"
    for row in rows:
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
    yield "</table>"


def _texts(rows: Iterable[Sequence[str]]) -> Iterator[list[str]]:
    return ([_text(cell) for cell in row] for row in rows)


def _differs(differs: bool) -> str:
    return "differs" if differs else "same"


def _text(text: str) -> str:
    return escaped(printable(text))
