"""Tables of text that fit a terminal: columns are shortened first, then left out."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

_GAP = "  "

#: A path shortened to less than this keeps only its end.
_SHORT = 20
_DOTS = "…"


@dataclass(frozen=True)
class Column:
    """A column: its title, and how its cells are aligned.

    ``shorten`` says where a cell may be cut: in the ``"middle"``, at the ``"end"``, or ``"never"``; a ``"path"`` loses
    its folders first, and the name of its file last. ``good`` is a width that is still easy to read, ``least`` the
    smallest useful width.
    """

    title: str
    shorten: str = "never"
    least: int = 0
    good: int = 0
    right: bool = False


@dataclass(frozen=True)
class Layout:
    """Columns; the titles of those to shorten in a narrow terminal, and of those to leave out, first to last.

    ``dtypes``: the titles of columns whose cells are dtypes.
    """

    columns: Sequence[Column]
    shortened: Sequence[str] = ()
    left_out: Sequence[str] = ()
    dtypes: Sequence[str] = ()


def render(
    layout: Layout,
    rows: Sequence[tuple[str, ...] | str],
    width: int | None,
    paint: Callable[[str, str], str] = lambda title, cell: cell,
) -> Iterator[str]:
    """Yield the table's lines: titles, a rule, and the rows; a row that is a text is a line of its own.

    Columns without any text are left out. With a ``width`` the columns that the layout shortens are shortened until a
    line fits: first those that say the same in every row, then the others, in that order. If that is not enough, those
    that it leaves out are dropped one by one. ``paint`` gets a column's title and a padded cell, and returns the
    cell with colours.
    """
    columns, shortened = layout.columns, layout.shortened
    cells = [row for row in rows if not isinstance(row, str)]
    filled = [at for at in range(len(columns)) if any(row[at] for row in cells)]
    widest = {at: max(len(columns[at].title), *(len(row[at]) for row in cells)) for at in filled}
    same = {columns[at].title for at in filled if len(cells) > 2 and len({row[at] for row in cells}) == 1}
    shown = [replace(column, least=_least(column, [row[at] for row in cells])) for at, column in enumerate(columns)]
    order = [title for title in shortened if title in same] + [title for title in shortened if title not in same]
    widths = _fit(shown, widest, width, order, layout.left_out)
    titles = [_cell(columns[at].title, columns[at], widths[at]) for at in widths]
    yield _GAP.join(titles).rstrip()
    yield _GAP.join("-" * widths[at] for at in widths)
    for row in rows:
        if isinstance(row, str):
            yield row if width is None else cut(row, width, "end")
            continue
        yield _GAP.join(paint(columns[at].title, _cell(row[at], columns[at], widths[at])) for at in widths).rstrip()


def _least(column: Column, cells: Sequence[str]) -> int:
    """Return the smallest useful width: of paths, one that leaves room for the longest name of a file."""
    if column.shorten != "path":
        return column.least
    names = max((len(cell.rpartition("/")[2]) + len(_DOTS) for cell in cells), default=0)
    return max(column.least, min(names, column.good))


def _fit(
    columns: Sequence[Column],
    widest: dict[int, int],
    width: int | None,
    shortened: Sequence[str],
    left_out: Sequence[str],
) -> dict[int, int]:
    """Return the width of each column by position, without the columns that do not fit."""
    places = {columns[at].title: at for at in widest}
    if width is None:
        return widest
    here = dict(widest)
    gone = [places[title] for title in left_out if title in places]
    while True:
        widths = _shortened(columns, here, width, [places[title] for title in shortened if title in places])
        if _total(widths) <= width or not gone or len(here) == 1:
            return widths
        del here[gone.pop(0)]


def _shortened(columns: Sequence[Column], widest: dict[int, int], width: int, order: Sequence[int]) -> dict[int, int]:
    """Return widths that fit if possible: each column in order to its good width, then the first to least, then all."""
    widths = {**widest}
    present = [at for at in order if at in widths]
    for at, floor in [(at, columns[at].good) for at in present] + [(at, columns[at].least) for at in present[:1]]:
        widths[at] = max(min(floor, widths[at]), widths[at] - max(_total(widths) - width, 0))
    spare = {at: max(widths[at] - columns[at].least, 0) for at in present}
    excess, whole = _total(widths) - width, sum(spare.values())
    if excess > 0 and whole > 0:
        for at in present:
            widths[at] -= min(-(-spare[at] * excess // whole), spare[at])
    return widths


def _total(widths: dict[int, int]) -> int:
    return sum(widths.values()) + len(_GAP) * (len(widths) - 1)


def _cell(text: str, column: Column, width: int) -> str:
    if len(text) > width:
        indent = text[: len(text) - len(text.lstrip())]
        text = indent + cut(text.lstrip(), width - len(indent), column.shorten)
    return text.rjust(width) if column.right else text.ljust(width)


def cut(text: str, width: int, where: str) -> str:
    """Return ``text`` in at most ``width`` characters, with dots for what was cut, as a column's ``shorten``."""
    if len(text) <= width:
        return text
    if where == "path":
        return _path_end(text, width)
    keep = max(width - len(_DOTS), 0)
    if where == "middle":
        tail = keep if keep < _SHORT else 2 * keep // 3  # the end of a path says more than its beginning
        return text[: keep - tail] + _DOTS + text[len(text) - tail :]
    return text[:keep].rstrip() + _DOTS


def _path_end(path: str, width: int) -> str:
    """Return the end of a path in ``width`` characters: the folders that fit and the file's name, or its end."""
    parts = path.split("/")
    ends = (f"{_DOTS}/{'/'.join(parts[at:])}" for at in range(1, len(parts)))
    fitting = next((end for end in ends if len(end) <= width), "")
    return fitting or _DOTS + parts[-1][max(len(parts[-1]) - width + len(_DOTS), 0) :]


def printable(text: str) -> str:
    """Return ``text`` on one line without control characters, so that a dump cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def labelled(lines: Iterable[tuple[str, str]], width: int | None) -> Iterator[str]:
    """Yield ``label  text`` for each pair, with the texts below each other, wrapped to ``width`` columns if given."""
    pairs = list(lines)
    longest = max((len(label) for label, _ in pairs), default=0)
    for label, text in pairs:
        shown = [printable(text)]
        if width is not None:
            shown = textwrap.wrap(shown[0], max(width - longest - len(_GAP), _SHORT), break_on_hyphens=False) or [""]
        for at, part in enumerate(shown):
            yield f"{'' if at else label:<{longest}}{_GAP}{part}".rstrip()
