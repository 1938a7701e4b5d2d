"""``--format text``: a table of the ops of each graph, with the reason for every dtype, and totals below it."""

from collections.abc import Callable, Iterator

from fxamp.listing.model import Entry, Listing
from fxamp.listing.totals import Index, is_step, totals, was_dtype
from fxamp.tools.common.table import Column, printable, render
from fxamp.tools.common.terminal import Look
from fxamp.tools.common.words import op_name, place, size
from fxamp.tools.show.kept_text import kept_lines
from fxamp.tools.show.select import Selection
from fxamp.tools.show.totals_text import totals_lines

_COLUMNS = (
    Column("node", "middle", least=10, good=24),
    Column("source", "middle", least=12, good=28),
    Column("module", "middle", least=6, good=20),
    Column("op", "end", least=8, good=20),
    Column("before"),
    Column("runs in"),
    Column("bytes", right=True),
    Column("rule", "end", least=8, good=16),
    Column("written at", "middle", least=10, good=20),
    Column("reason", "end", least=16, good=20),
)
#: The columns to shorten on a narrow terminal, then those to leave out, first to last.
_SHORTENED = ("reason", "written at", "source", "module", "rule", "node", "op")
_LEFT_OUT = ("written at", "reason", "source", "module", "rule", "bytes", "before")


def text_lines(selection: Selection, title: str, look: Look) -> Iterator[str]:
    """Yield the lines for the selected graphs; ``title`` names the input."""
    if not selection.graphs:
        yield f"no graphs in {title}"
    for at, (number, listing) in enumerate(selection.graphs):
        yield from [""] if at else []
        yield from _header(listing, number, title)
        yield ""
        rows = list(_rows(listing, selection))
        if rows:
            yield from render(_COLUMNS, rows, look.width, _SHORTENED, _LEFT_OUT, _painter(look))
        else:
            yield "no ops"
        yield ""
        if listing.kept and not selection.narrows:
            yield from kept_lines(listing, look, by_size=False)
            yield ""
        yield from totals_lines(listing, totals(listing, selection.scope), whole=not selection.scoped)


def kept_text(selection: Selection, title: str, look: Look) -> Iterator[str]:
    """Yield the lines of ``--kept`` for the selected graphs."""
    for at, (number, listing) in enumerate(selection.graphs):
        yield from [""] if at else []
        yield from _header(listing, number, title)
        yield ""
        yield from kept_lines(listing, look, by_size=True)


def has_records(listing: Listing) -> bool:
    """Whether it contains fxamp's decisions."""
    return bool(listing.policy) or any(entry.rule or entry.reason or entry.inserted for entry in listing.entries)


def _header(listing: Listing, number: int, title: str) -> Iterator[str]:
    stage = f", {listing.stage}" if listing.stage else ""
    name = "" if listing.name in ("", "GraphModule", "<lambda>", f"graph_{number}") else f" {listing.name}"
    yield printable(f"graph {number}{name}{stage}: {title}")
    if listing.policy:
        device = f" on {listing.device}" if listing.device else ""
        chosen = f", {listing.chosen}" if listing.chosen else ""
        yield printable(f"policy {listing.policy}{device}{chosen}")
    elif not has_records(listing):
        yield "no policy was applied to it: --policy NAME shows what one would do, and why"


def _rows(listing: Listing, selection: Selection) -> Iterator[tuple[str, ...]]:
    names, records = Index(), has_records(listing)
    depth = _depths(listing)
    for where, entry in listing.walk():
        if is_step(entry) and selection.shows(entry):
            yield tuple(map(printable, _row(where, entry, names, records, "  " * depth[id(where)])))


def _row(where: Listing, entry: Entry, names: Index, records: bool, indent: str) -> tuple[str, ...]:
    moved = names.bytes_cast(where, entry) if entry.is_cast else None
    return (
        indent + entry.name,
        place(entry.source),
        entry.module,
        op_name(entry),
        _before(where, entry, names, records),
        entry.runs_in,
        size(moved) if moved is not None else "?" if entry.is_cast else "",
        entry.rule.id if entry.rule is not None else "",
        entry.rule.origin if entry.rule is not None else "",
        _reason(entry),
    )


def _before(where: Listing, entry: Entry, names: Index, records: bool) -> str:
    if entry.is_cast:
        return next((source.dtype for source in names.inputs(where, entry)), "")
    return was_dtype(entry) or (entry.dtype if records else "")


def _reason(entry: Entry) -> str:
    kept = f"kept as captured: {entry.verbatim}" if entry.verbatim else ""
    parts = [entry.inserted or entry.reason, entry.overruled and f"overruled: {entry.overruled}"]
    return "; ".join(part for part in parts if part) or kept


def _depths(listing: Listing, depth: int = 0) -> dict[int, int]:
    """Return the nesting depth of each body, by the identity of its listing."""
    found = {id(listing): depth}
    for body in listing.bodies.values():
        found |= _depths(body, depth + 1)
    return found


def _painter(look: Look) -> Callable[[str, str], str]:
    def paint(title: str, cell: str) -> str:
        if title in ("before", "runs in"):
            return look.dtype(cell.strip(), cell)
        return look.cast(cell) if title == "op" and cell.strip() == "cast" else cell

    return paint
