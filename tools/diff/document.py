"""A comparison as parts, which every format for people writes in order, each in its own way."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxamp.tools.common.formatting import plural
from fxamp.tools.common.table import Column, Layout
from fxamp.tools.diff.result import Comparison
from fxamp.tools.diff.words import SIGNS, groups, ops_counted, rule_text, value, written_at

Cells = tuple[str, ...]


class Shape(NamedTuple):
    """How text writes a part, where other formats write a table.

    ``name``: "table", "marks" (a sign, a name, a line), "groups" (headings over lines) or "facts" (a label, a line).
    ``line``: makes the line of the cells that are left.
    """

    name: str
    line: Callable[..., str] = str


_TABLE, _NOTHING = Shape("table"), Layout(())


@dataclass(frozen=True)
class Part:
    """A title, rows under it, and remarks; any may be missing. ``folds``: Markdown collapses the rows.

    ``prose``: the titles of columns whose cells are prose; all others are code. ``verbatim``: the remarks are lines of
    another command.
    """

    title: str = ""
    layout: Layout = _NOTHING
    rows: Sequence[Cells] = ()
    shape: Shape = _TABLE
    folds: bool = False
    remarks: Sequence[str] = ()
    verbatim: bool = False
    prose: Sequence[str] = ()

    def columns_with_text(self) -> tuple[list[str], list[Cells]]:
        """Return titles and rows without the columns that have no text."""
        columns = self.layout.columns
        shown = [at for at in range(len(columns)) if any(row[at] for row in self.rows)]
        return [columns[at].title for at in shown], [tuple(row[at] for at in shown) for row in self.rows]


def change(old: str, new: str) -> str:
    """Return ``"3 -> 4"``, or one value if both are the same."""
    return old if old == new else f"{old or 'none'} -> {new or 'none'}"


def titles(*names: str) -> Layout:
    """Return the layout of columns that are never shortened."""
    return Layout(tuple(map(Column, names)))


def parts(comparison: Comparison) -> Iterator[Part]:
    """Yield the parts of the whole comparison."""
    yield from policy_parts(comparison)
    for effect in comparison.effects:
        from fxamp.tools.diff.effect_parts import effect_parts

        yield from effect_parts(effect)
    for cost in comparison.costs:
        yield Part(remarks=list(cost.lines()), verbatim=True)
    for numbers in comparison.runs:
        from fxamp.tools.diff.numbers_parts import numbers_parts

        yield from numbers_parts(numbers)


def policy_parts(comparison: Comparison) -> Iterator[Part]:
    """Yield the settings, the rules and the ops that differ, as far as there are any."""
    settings = setting_rows(comparison)
    if settings:
        yield Part("", titles("", "setting", "old", "new"), settings, Shape("marks", change))
    rules = [(SIGNS[one.kind], one.id, rule_text(one), written_at(one)) for one in comparison.diff.rules]
    if rules:
        layout = titles("", "rule", "change", "written at")
        yield Part("rules", layout, rules, Shape("marks", _with_place), folds=True, prose=["change"])
    ops = [
        (group.heading if at == 0 else "", label, ", ".join(items))
        for group in groups(comparison.diff.ops)
        for at, (label, items) in enumerate(group.lines)
    ]
    if ops:
        title = f"{plural(ops_counted(comparison.diff.ops), 'op')} decided differently"
        names = ("decision", "rule", "concerns")
        yield Part(title, titles(*names), ops, Shape("groups"), folds=True, prose=names)


def setting_rows(comparison: Comparison) -> list[Cells]:
    """Return the settings that differ: mark, key, old and new value."""
    marked = [("~", one.key, one) for one in comparison.settings]
    marked += [("!", f"loss_scale.{one.key}", one) for one in comparison.loss_scale]
    return [(sign, key, value(one.old), value(one.new)) for sign, key, one in marked]


def _with_place(text: str, place: str) -> str:
    return f"{text}  [{place}]" if place else text
