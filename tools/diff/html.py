"""``--format html``: one self-contained page without scripts, with both policies side by side on every graph."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fxamp.graph_text.totals import Totals
from fxamp.tools.common.formatting import bytes_cast, counted, plural, size
from fxamp.tools.common.page import colour, colours, escaped
from fxamp.tools.common.table import printable
from fxamp.tools.diff.document import parts
from fxamp.tools.diff.part import Part, titles
from fxamp.tools.diff.result import Comparison
from fxamp.tools.diff.words import summary

if TYPE_CHECKING:
    from fxamp.tools.diff.effect import Effect
    from fxamp.tools.diff.side_by_side import Cell, Module, Row

_STYLE = Path(__file__).with_name("page.css")


def html_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the page."""
    title = _text(f"{comparison.old.policy.name} → {comparison.new.policy.name}")
    style = colours() + _STYLE.read_text(encoding="utf-8")
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title} - fxamp-diff</title>\n<style>{style}</style>\n</head>\n<body>"
    yield f"<header><h1>{title}</h1><p>{_text(summary(comparison))}</p>"
    if comparison.effects:
        yield '<label><input type="checkbox" id="all"> what is the same, too</label>'
    yield "</header>\n<main>"
    sides = [(side.policy.name, side.about) for side in (comparison.old, comparison.new)]
    rest = (about.removeprefix(name).lstrip(" ,") for name, about in sides)
    yield from _part(Part("", titles("", "old", "new"), [("policy", *(name for name, _ in sides)), ("", *rest)]))
    for effect in comparison.effects:
        yield from _effect(effect, comparison)
    for part in parts(replace(comparison, effects=())):
        yield from _part(part)
    yield "</main>\n</body>\n</html>"


def _part(part: Part) -> Iterator[str]:
    """Yield a section with a title, a table, and remarks, as far as the part has them."""
    yield "<section>"
    if part.title:
        yield f"<h2>{_text(part.title)}</h2>"
    if part.rows:
        names, rows = part.columns_with_text()
        yield f"<table><tr>{''.join(f'<th>{_text(name)}</th>' for name in names)}</tr>"
        yield from (f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
        yield "</table>"
    if part.verbatim:
        yield "<pre>"
    yield from (_text(remark) if part.verbatim else f"<p>{_text(remark)}</p>" for remark in part.remarks)
    if part.verbatim:
        yield "</pre>"
    yield "</section>"


def _effect(effect: "Effect", comparison: Comparison) -> Iterator[str]:
    """Yield the totals of one graph, and its modules and ops under both policies."""
    from fxamp.tools.diff.effect_parts import effect_parts
    from fxamp.tools.diff.side_by_side import modules

    for part in effect_parts(effect):
        if not part.folds:  # the ops stand below, side by side
            yield from _part(part)
    if effect.listings is None:
        return
    all_modules = modules(*effect.listings)
    yield f'<section class="{_differs(any(module.differs for module in all_modules))}">'
    names = "".join(f"<span>{_text(side.policy.name)}</span>" for side in (comparison.old, comparison.new))
    yield f'<div class="row head"><span>module</span>{names}</div>'
    for module in all_modules:
        yield from _module(module)
    yield "</section>"


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


def _bar(counts: Mapping[str, int]) -> str:
    """Return a bar with a part for each dtype, as wide as its share of the ops."""
    all_ops = sum(counts.values())
    parts = (
        f'<i style="background:{colour(dtype)};width:{100 * count / all_ops:.1f}%"></i>'
        for dtype, count in counts.items()
    )
    return f'<span class="bar">{"".join(parts)}</span>' if all_ops else ""


def _differs(differs: bool) -> str:
    return "differs" if differs else "same"


def _text(text: str) -> str:
    return escaped(printable(text))
