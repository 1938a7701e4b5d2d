"""``--format text``: what matters first, then a table of the ops of each graph, with the reason for every dtype."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxamp.graph_text.model import Entry, Listing
from fxamp.graph_text.totals import Index, is_op, is_step, was_dtype
from fxamp.tools.common.columns import MODULE, NODE, OP, REASON, RULE, SOURCE, painter
from fxamp.tools.common.formatting import op_name, place, plural, size
from fxamp.tools.common.table import Column, Layout, labelled, printable, render
from fxamp.tools.common.terminal import Look
from fxamp.tools.show.fold import Alike, folded, repeated
from fxamp.tools.show.kept_text import kept_lines
from fxamp.tools.show.select import Selection
from fxamp.tools.show.summary import summary

_LAYOUT = Layout(
    (
        NODE,
        SOURCE,
        MODULE,
        OP,
        Column("before"),
        Column("runs in"),
        Column("times", right=True),
        Column("bytes", right=True),
        RULE,
        Column("written at", "path", least=10, good=20),
        REASON,
    ),
    ("reason", "written at", "source", "module", "rule", "node", "op"),
    ("written at", "reason", "source", "module", "rule", "bytes", "before"),
    ("before", "runs in"),
)


@dataclass(frozen=True)
class View:
    """How to print a graph.

    ``fold``: sibling blocks that show the same once; ``sort``: what ``--sort`` accepts, ``""`` for the graph's order.
    """

    fold: bool = True
    sort: str = ""


_DEFAULT = View()


def text_lines(selection: Selection, title: str, look: Look, view: View = _DEFAULT) -> Iterator[str]:
    """Yield the lines for the selected graphs; ``title`` names the input."""
    if not selection.graphs:
        yield f"no graphs in {title}"
    for at, (number, listing) in enumerate(selection.graphs):
        yield from [""] if at else []
        yield from _header(listing, number, title)
        yield ""
        yield from labelled(summary(listing, number, selection), look.width)
        yield ""
        shown = listing, selection, view.fold
        rows = _sorted_rows(*shown) if view.sort == "bytes" else _Rows(*shown).rows()
        if rows:
            yield from render(_LAYOUT, rows, look.width, painter(look, *_LAYOUT.dtypes))
        else:
            yield "no ops"
        if (listing.kept or view.sort == "kept") and not selection.narrows:
            yield ""
            yield from kept_lines(listing, look, view.sort == "kept", view.fold)


def kept_text(selection: Selection, title: str, look: Look, view: View = _DEFAULT) -> Iterator[str]:
    """Yield the lines of ``--kept`` for the selected graphs."""
    for at, (number, listing) in enumerate(selection.graphs):
        yield from [""] if at else []
        yield from _header(listing, number, title)
        yield ""
        yield from kept_lines(listing, look, True, view.fold)


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


class _Rows:
    """The rows of one graph: a row for each op and cast, a line for each fold."""

    def __init__(self, listing: Listing, selection: Selection, fold: bool) -> None:
        self._listing, self._selection, self._fold = listing, selection, fold
        self._names, self._records = Index(), has_records(listing)

    def rows(self) -> list[tuple[str, ...] | str]:
        """Return the rows in the order of the graph."""
        return list(self._of(self._listing, self._parts(self._listing), 0))

    def _parts(self, where: Listing) -> Sequence[Entry | Alike]:
        shown = [entry for entry in where.entries if entry.is_call and (entry.bodies or self._selection.shows(entry))]
        return folded(where, shown) if self._fold else shown

    def _of(self, where: Listing, parts: Sequence[Entry | Alike], depth: int) -> Iterator[tuple[str, ...] | str]:
        for part in parts:
            if isinstance(part, Alike):
                inside = list(self._of(where, part.parts, depth + 1))
                yield from [f"{'  ' * depth}{printable(self._title(where, part))}", *inside] if inside else ()
                continue
            if is_step(part) and self._selection.shows(part):
                row = _row(where, part, self._names, self._records)
                yield printable("  " * depth + row[0]), *map(printable, row[1:])
            for body in (where.bodies[name] for name in part.bodies if name in where.bodies):
                yield from self._of(body, self._parts(body), depth + 1)

    def _title(self, where: Listing, alike: Alike) -> str:
        inside = [(at, inner, times) for entry, times in alike.entries() for at, inner in _with_bodies(where, entry)]
        shown = [(at, inner, times) for at, inner, times in inside if self._selection.shows(inner)]
        ops = sum(times for _, inner, times in shown if is_op(inner))
        casts = [(self._names.bytes_cast(at, inner), times) for at, inner, times in shown if inner.is_cast]
        count = sum(times for _, times in casts)
        known = sum(moved * times for moved, times in casts if moved is not None)
        least = "at least " if any(moved is None for moved, _ in casts) else ""
        moved = f", {least}{size(known)}" if casts else ""
        names = f"{alike.first} .. {alike.last} ({alike.count} alike)"
        return f"{names}: {plural(ops, 'op')}, {plural(count, 'cast')}{moved}; the first:"


def _with_bodies(where: Listing, entry: Entry) -> Iterator[tuple[Listing, Entry]]:
    yield where, entry
    for name in entry.bodies:
        if name in where.bodies:
            yield from where.bodies[name].walk()


def _sorted_rows(listing: Listing, selection: Selection, fold: bool) -> list[tuple[str, ...]]:
    """Return the rows by the bytes that they cast, the largest first; ``fold``: in all equal blocks together."""
    names, records = Index(), has_records(listing)
    weighed = []
    for where, entry, times in _counted(listing, fold):
        if is_step(entry) and selection.shows(entry):
            moved = names.bytes_cast(where, entry) if entry.is_cast else None
            weighed.append(((moved or 0) * times, _row(where, entry, names, records, times)))
    return [tuple(map(printable, row)) for _, row in sorted(weighed, key=lambda pair: -pair[0])]


def _counted(listing: Listing, fold: bool) -> Iterator[tuple[Listing, Entry, int]]:
    """Yield the calls of a graph and its bodies, each with its number of equals in sibling blocks if ``fold``."""
    calls = [entry for entry in listing.entries if entry.is_call]
    for entry, times in repeated(folded(listing, calls) if fold else calls):
        for where, inner in _with_bodies(listing, entry):
            yield where, inner, times


def _row(where: Listing, entry: Entry, names: Index, records: bool, times: int = 1) -> tuple[str, ...]:
    moved = names.bytes_cast(where, entry) if entry.is_cast else None
    return (
        entry.name,
        place(entry.source),
        entry.module,
        op_name(entry),
        _before(where, entry, names, records),
        entry.runs_in,
        str(times) if times > 1 else "",
        size(moved * times) if moved is not None else "?" if entry.is_cast else "",
        entry.rule.id if entry.rule is not None else "",
        entry.rule.origin if entry.rule is not None else "",
        _reason(entry),
    )


def _before(where: Listing, entry: Entry, names: Index, records: bool) -> str:
    if entry.is_cast:
        return names.cast_from(where, entry)
    return was_dtype(entry) or (entry.dtype if records else "")


def _reason(entry: Entry) -> str:
    verbatim = f"verbatim: {entry.verbatim}" if entry.verbatim else ""
    parts = [entry.inserted or entry.reason, entry.overruled and f"overruled: {entry.overruled}"]
    return "; ".join(part for part in parts if part) or verbatim
