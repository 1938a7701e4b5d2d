"""One graph under two policies, side by side: its modules in order, and in each the ops with dtype, rule and casts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fxamp.graph_text.model import Entry, Listing, RuleRef
from fxamp.graph_text.totals import Index, Totals, is_op, totals
from fxamp.tools.common.formatting import op_name, overruled, place, size_or
from fxamp.tools.common.numbered_rows import combined


@dataclass(frozen=True)
class Cell:
    """One op under one policy: the dtype that it runs in, its rule's id and place, why, and the casts of its inputs."""

    dtype: str
    rule: str
    at: str
    reason: str
    casts: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One op under both policies; None under the one whose graph lacks it."""

    name: str
    op: str
    source: str
    old: Cell | None
    new: Cell | None

    @property
    def differs(self) -> bool:
        """Whether it runs in another dtype, by another rule, or behind other casts."""
        if self.old is None or self.new is None:
            return True
        old, new = ((cell.dtype, cell.rule, cell.casts) for cell in (self.old, self.new))
        return old != new

    def content(self) -> tuple[object, ...]:
        """Return everything but its name: equal for the same op of equal modules."""
        return self.op, self.source, self.old, self.new


@dataclass(frozen=True)
class Module:
    """The ops of one module, or of ``count`` modules that differ only in the numbers of their paths (``h.*.attn``).

    ``kept`` are the bytes that it keeps for the backward, None under a policy that does not say how. The totals and
    bytes are those of one of them.
    """

    path: str
    module_class: str
    count: int
    rows: tuple[Row, ...]
    sums: tuple[Totals, Totals]
    kept: tuple[int | None, int | None]

    @property
    def differs(self) -> bool:
        """Whether any op, cast or kept byte of it differs."""
        old, new = self.counts
        return any(row.differs for row in self.rows) or old != new or self.kept[0] != self.kept[1]

    @property
    def counts(self) -> list[tuple[int, ...]]:
        """Return the counts of casts, old and new."""
        return [(sums.casts, sums.cast_bytes, sums.casts_of_unknown_size) for sums in self.sums]


def modules(old: Listing, new: Listing) -> list[Module]:
    """Return the modules of a graph in order of first use, those that differ only in their number as one."""
    sides = ops_by_path(old), ops_by_path(new)
    names: dict[str, list[tuple[str, ...]]] = {}
    for key, (_, entry) in {**sides[0], **sides[1]}.items():
        names.setdefault(entry.module, []).append(key)
    for path in _casting(old, new):
        names.setdefault(path, [])
    single = [_module(path, keys, (old, new), sides) for path, keys in names.items()]
    groups = combined(single, lambda module: module.path, _content)
    return [replace(group.first, path=group.module, count=group.count) for group in groups]


def _content(module: Module) -> tuple[object, ...]:
    return module.module_class, tuple(row.content() for row in module.rows), *module.counts, module.kept


_Ops = Mapping[tuple[str, ...], tuple[Listing, Entry]]


def ops_by_path(listing: Listing, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], tuple[Listing, Entry]]:
    """Return the ops with the graph or body that holds them, by name after the names of those bodies."""
    ops: dict[tuple[str, ...], tuple[Listing, Entry]] = {}
    for entry in listing.entries:
        if is_op(entry):
            ops[(*path, entry.name)] = (listing, entry)
        for body in entry.bodies:
            if body in listing.bodies:
                ops |= ops_by_path(listing.bodies[body], (*path, body))
    return ops


def _casting(*listings: Listing) -> Iterator[str]:
    """Yield the modules whose only nodes may be casts."""
    for listing in listings:
        yield from dict.fromkeys(entry.module for _, entry in listing.walk() if entry.is_cast)


def _module(
    path: str, keys: list[tuple[str, ...]], graphs: tuple[Listing, Listing], sides: tuple[_Ops, _Ops]
) -> Module:
    index = Index()
    rows = tuple(_row(key, sides, index) for key in keys)
    entries = [sides[at][key][1] for key in keys for at in (0, 1) if key in sides[at]]
    old, new = (totals(graph, lambda entry: entry.module == path) for graph in graphs)
    kept = _bytes_kept(graphs[0], path), _bytes_kept(graphs[1], path)
    return Module(path, entries[0].module_class if entries else "", 1, rows, (old, new), kept)


def _bytes_kept(listing: Listing, path: str) -> int | None:
    """Return the bytes that a module keeps; None if one is unknown, or if the listing says nothing about modules."""
    values = [value.after for value in listing.kept if value.module == path]
    known = [value for value in values if value is not None]
    return sum(known) if listing.kept and len(known) == len(values) else None


def _row(key: tuple[str, ...], sides: tuple[_Ops, _Ops], index: Index) -> Row:
    old, new = (_cell(*side[key], index) if key in side else None for side in sides)
    entry = (sides[1].get(key) or sides[0][key])[1]
    return Row("/".join(key), op_name(entry), place(entry.source), old, new)


def _cell(listing: Listing, entry: Entry, index: Index) -> Cell:
    casts = tuple(_cast(listing, source, index) for source in index.inputs(listing, entry) if source.is_cast)
    rule = entry.rule or RuleRef("")
    return Cell(entry.runs_in, rule.id, rule.origin, overruled(entry) or entry.reason, casts)


def _cast(listing: Listing, cast: Entry, index: Index) -> str:
    """Return ``"f32 to bf16, 2.0 KiB"``."""
    (source,) = index.inputs(listing, cast) or [cast]
    return f"{source.dtype} to {cast.dtype}, {size_or(index.bytes_cast(listing, cast), 'size unknown')}"
