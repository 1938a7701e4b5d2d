"""Numbers about a listing: ops by dtype, casts and the bytes they move, saved values. Imports no torch."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fxamp.graph_text.model import FP8, Entry, KeptValue, Listing

#: Calls that are not operations of the program: they select one of several results, or compute a size.
_PICKS = frozenset({"_operator.getitem", "operator.getitem", "builtins.getitem", "getitem"})


@dataclass(frozen=True)
class Totals:
    """The totals of one graph and its bodies.

    ``ops`` counts operations without the inserted casts. ``ops_by_dtype`` counts the same by the dtype they run in
    (``"other"``: no tensor, or unknown), most first. ``casts`` counts the inserted casts. ``cast_bytes`` are the bytes
    that they read and write together, without the ``casts_of_unknown_size``. ``shared`` and ``folded`` are the passes'
    counts, None if they were not recorded. ``without_rule`` counts, by name, the ops without a rule, most first; it is
    empty if no policy was applied. ``verbatim`` says, by node, what is left verbatim, and why. ``fp8`` counts the
    products in fp8 by recipe; ``not_fp8`` says, by node, why other products are not in fp8.
    """

    ops: int
    ops_by_dtype: Mapping[str, int]
    casts: int
    cast_bytes: int
    casts_of_unknown_size: int
    shared: int | None
    folded: int | None
    without_rule: Mapping[str, int]
    verbatim: Mapping[str, str]
    fp8: Mapping[str, int]
    not_fp8: Mapping[str, str]


def by_reason(reasons: Mapping[str, str], most: int) -> Iterator[str]:
    """Yield each reason once, after the names of the nodes that have it; at most ``most`` names."""
    nodes: dict[str, list[str]] = {}
    for node, why in reasons.items():
        nodes.setdefault(why, []).append(node)
    for why, names in nodes.items():
        more = f" and {len(names) - most} more" if len(names) > most else ""
        yield f"{', '.join(names[:most])}{more}: {why}"


def totals(listing: Listing, keep: Callable[[Entry], bool] = lambda entry: True) -> Totals:
    """Count the entries of ``listing`` and its bodies that ``keep`` accepts."""
    by_name = Index()
    chosen = [(where, entry) for where, entry in listing.walk() if keep(entry)]
    ops = [entry for _, entry in chosen if is_op(entry)]
    moved = [by_name.bytes_cast(where, entry) for where, entry in chosen if entry.is_cast]
    known = [count for count in moved if count is not None]
    without_rule = [entry.target for entry in ops if entry.rule is None] if listing.policy else []
    return Totals(
        ops=len(ops),
        ops_by_dtype=dict(Counter(entry.runs_in or "other" for entry in ops).most_common()),
        casts=len(moved),
        cast_bytes=sum(known),
        casts_of_unknown_size=len(moved) - len(known),
        shared=listing.counts.get("shared"),
        folded=listing.counts.get("folded"),
        without_rule=dict(Counter(without_rule).most_common()),
        verbatim={entry.name: entry.verbatim for _, entry in chosen if entry.verbatim},
        fp8=dict(Counter(e.rule.cast.removeprefix("fp8 ") for e in ops if e.rule and e.runs_in in FP8).most_common()),
        not_fp8={entry.name: entry.not_fp8 for entry in ops if entry.not_fp8},
    )


def is_pick(entry: Entry) -> bool:
    """Whether this only selects one of several results."""
    return entry.is_call and entry.target in _PICKS


def is_op(entry: Entry) -> bool:
    """Whether this is an op of the program: not an inserted node, a higher-order op, a getitem, or size arithmetic."""
    if not is_step(entry) or entry.inserted or entry.target.startswith("higher_order::"):
        return False
    return "::" in entry.target or bool(entry.values)


def is_step(entry: Entry) -> bool:
    """Whether this is a call that does work: it does not only select a result or compute a size."""
    return entry.is_call and not entry.symbol and not is_pick(entry)


def changed(entry: Entry) -> bool:
    """Whether its dtypes differ from the captured ones."""
    return bool(entry.was) and entry.was != tuple(value.dtype for value in entry.values)


def was_dtype(entry: Entry) -> str:
    """Return the captured dtype of the value that ``entry.dtype`` describes; ``""`` if unknown or the same."""
    dtypes = [value.dtype for value in entry.values]
    if not entry.was or len(entry.was) != len(dtypes):
        return entry.was[0] if entry.was else ""
    return entry.was[dtypes.index(entry.dtype)]


class Index:
    """Finds nodes by name in a graph or body; each listing is indexed once."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[Listing, dict[str, Entry]]] = {}

    def of(self, listing: Listing) -> Mapping[str, Entry]:
        """Return the nodes of ``listing`` by name, without those of its bodies."""
        if id(listing) not in self._names:
            self._names[id(listing)] = (listing, {entry.name: entry for entry in listing.entries})
        return self._names[id(listing)][1]

    def inputs(self, listing: Listing, entry: Entry) -> list[Entry]:
        """Return the nodes that ``entry`` reads and that ``listing`` holds."""
        names = self.of(listing)
        return [names[name] for name in entry.inputs if name in names]

    def cast_from(self, listing: Listing, cast: Entry) -> str:
        """Return the dtype of what a cast reads, ``""`` if unknown."""
        return next((source.dtype for source in self.inputs(listing, cast)), "")

    def bytes_cast(self, listing: Listing, cast: Entry) -> int | None:
        """Return the bytes that a cast reads and writes: elements x (bytes per element before + after), or None."""
        sources = self.inputs(listing, cast)
        if len(sources) != 1 or len(sources[0].values) != 1 or len(cast.values) != 1:
            return None
        read, written = sources[0].values[0].bytes, cast.values[0].bytes
        return None if read is None or written is None else read + written


def total(sizes: Iterable[int | None]) -> int | None:
    """Return the sum; None if one of ``sizes`` is unknown."""
    every = list(sizes)
    known = [size for size in every if size is not None]
    return sum(known) if len(known) == len(every) else None


def totals_of(values: Iterable[KeptValue]) -> tuple[int | None, int | None]:
    """Return the bytes of all ``values`` before and after; None if unknown."""
    listed = list(values)
    return total(value.before for value in listed), total(value.after for value in listed)


def largest_first(values: Iterable[KeptValue]) -> list[KeptValue]:
    """Return ``values`` sorted by their bytes after, then by their bytes before, the largest first."""
    return sorted(values, key=lambda value: (-(value.after or 0), -(value.before or 0)))
