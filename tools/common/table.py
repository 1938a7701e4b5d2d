"""Tables of text that fit a terminal: columns are shortened first, then left out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_GAP = "  "

#: A path shortened to less than this keeps only its end.
_SHORT = 20
_DOTS = "…"


@dataclass(frozen=True)
class Column:
    """A column: its title, and how its cells are aligned.

    ``shorten`` says where a cell may be cut: in the ``"middle"``, at the ``"end"``, or ``"never"``. ``good`` is a width
    that is still easy to read, ``least`` the smallest useful width.
    """

    title: str
    shorten: str = "never"
    least: int = 0
    good: int = 0
    right: bool = False


def render(
    columns: Sequence[Column],
    rows: Sequence[tuple[str, ...]],
    width: int | None = None,
    shortened: Sequence[str] = (),
    left_out: Sequence[str] = (),
    paint: Callable[[str, str], str] = lambda title, cell: cell,
) -> Iterator[str]:
    """Yield the table's lines: titles, a rule, and the rows.

    Columns without any text are left out. With a ``width`` the columns named in ``shortened`` are shortened, in that
    order, until a line fits; if that is not enough, those named in ``left_out`` are dropped one by one. ``paint`` gets
    a column's title and a padded cell, and returns the cell with colours.
    """
    filled = [at for at in range(len(columns)) if any(row[at] for row in rows)]
    widest = {at: max(len(columns[at].title), *(len(row[at]) for row in rows)) for at in filled}
    widths = _fit(columns, widest, width, shortened, left_out)
    titles = [_cell(columns[at].title, columns[at], widths[at]) for at in widths]
    yield _GAP.join(titles).rstrip()
    yield _GAP.join("-" * widths[at] for at in widths)
    for row in rows:
        cells = (paint(columns[at].title, _cell(row[at], columns[at], widths[at])) for at in widths)
        yield _GAP.join(cells).rstrip()


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
        text = cut(text, width, column.shorten)
    return text.rjust(width) if column.right else text.ljust(width)


def cut(text: str, width: int, where: str) -> str:
    """Return ``text`` in at most ``width`` characters, with dots for what was cut at the ``"end"`` or ``"middle"``."""
    if len(text) <= width:
        return text
    keep = max(width - len(_DOTS), 0)
    if where == "middle":
        tail = keep if keep < _SHORT else 2 * keep // 3  # the end of a path says more than its beginning
        return text[: keep - tail] + _DOTS + text[len(text) - tail :]
    return text[:keep].rstrip() + _DOTS


def printable(text: str) -> str:
    """Return ``text`` on one line without control characters, so that a dump cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
