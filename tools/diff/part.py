"""A part of a comparison: a title, rows and remarks, which each format for readers writes in its own way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxamp.tools.common.table import Column, Layout

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
