"""``--why NODE``: explain a node's dtype, back to the cast, rule or graph input where that dtype starts."""

from collections.abc import Iterator
from dataclasses import dataclass

from fxamp.errors import OptionError, nearest
from fxamp.graph_text.model import FLOATS, Entry, Listing
from fxamp.graph_text.totals import Index, is_pick, was_dtype
from fxamp.tools.common.formatting import op_name, place, rule_name, size
from fxamp.tools.common.table import printable

#: The maximum number of nodes in a chain.
_LONGEST = 60

#: The maximum number of users to name.
_MOST_USERS = 20


@dataclass(frozen=True)
class _Place:
    """A node with the graph and body that contain it."""

    number: int
    path: str
    listing: Listing
    entry: Entry


def why_lines(graphs: tuple[tuple[int, Listing], ...], asked: str) -> Iterator[str]:
    """Yield the explanation of every node that ``asked`` names: ``NODE``, ``BODY/NODE``, ``GRAPH:NODE`` or all three.

    Raises OptionError with the nearest match if there is no such node.
    """
    all_nodes = [node for number, listing in graphs for node in _walk(number, listing, "")]
    matches = [node for node in all_nodes if _is_named(node, asked)]
    if not matches:
        names = {node.entry.name for node in all_nodes} | {node.path + node.entry.name for node in all_nodes}
        hint = nearest(asked.partition(":")[2] or asked, sorted(names))
        raise OptionError(f"--why {asked!r}: no node has this name{hint}; accepted: NODE, BODY/NODE or GRAPH:NODE")
    several = len(graphs) > 1
    index = Index()
    for at, node in enumerate(matches):
        yield from [""] if at else []
        where = f" in graph {node.number}" if several else ""
        yield printable(f"{node.path}{node.entry.name}{where}")
        for label, text in _facts(node, index):
            yield f"  {label:<9}  {printable(text)}".rstrip()


def _walk(number: int, listing: Listing, path: str) -> Iterator[_Place]:
    for entry in listing.entries:
        yield _Place(number, path, listing, entry)
    for name, body in listing.bodies.items():
        yield from _walk(number, body, f"{path}{name}/")


def _is_named(node: _Place, asked: str) -> bool:
    number, colon, rest = asked.partition(":")
    if colon and number.isdecimal():
        return node.number == int(number) and _is_named_here(node, rest)
    return _is_named_here(node, asked)


def _is_named_here(node: _Place, asked: str) -> bool:
    whole = node.path + node.entry.name
    return asked in (whole, node.entry.name) or ("/" in asked and whole.endswith("/" + asked))


def _facts(node: _Place, index: Index) -> Iterator[tuple[str, str]]:
    entry = node.entry
    yield "is", entry.call or f"{entry.kind} {entry.target}"
    if entry.source is not None:
        inside = f" in {entry.source.function}" if entry.source.function else ""
        yield "source", f"{place(entry.source)}{inside}: {entry.source.code}"
    if entry.module:
        yield "module", f"{entry.module} ({entry.module_class})" if entry.module_class else entry.module
    yield from _dtype(node, index)
    yield from _decision(entry)
    if entry.is_cast:
        yield from _cast(node, index)
    if entry.is_cast or not entry.is_call:
        yield from _used_by(node)
    elif entry.rule is None or entry.overruled:
        yield from _chain(node, index)


def _dtype(node: _Place, index: Index) -> Iterator[tuple[str, str]]:
    entry = node.entry
    before = index.cast_from(node.listing, entry) if entry.is_cast else was_dtype(entry)
    now = ", ".join(map(str, entry.values))
    if now:
        yield "dtype", f"{before} -> {now}" if before and before != entry.dtype else now


def _decision(entry: Entry) -> Iterator[tuple[str, str]]:
    if entry.rule is not None:
        cast = f": {entry.rule.cast}" if entry.rule.cast else ""
        yield "rule", f"{rule_name(entry.rule)}{cast}"
    reason = entry.reason or (entry.rule.why if entry.rule is not None else "")
    for label, text in (("because", reason), ("inserted", entry.inserted), ("verbatim", entry.verbatim)):
        if text:
            yield label, text
    for rule in reversed(entry.lost):
        yield "lost", f"{rule_name(rule)}: {rule.cast or 'a rule'} matched too, and a later rule wins"
    if entry.overruled:
        yield "overruled", entry.overruled
    elif entry.not_fp8:
        yield "not fp8", entry.not_fp8
    if entry.region:
        off = entry.region == "off"
        yield "region", "autocast is off here" if off else f"autocast's lower precision here is {entry.region}"


def _cast(node: _Place, index: Index) -> Iterator[tuple[str, str]]:
    moved = index.bytes_cast(node.listing, node.entry)
    yield "bytes", "unknown: its size is symbolic or not in the dump" if moved is None else f"{size(moved)} per step"
    for source in index.inputs(node.listing, node.entry):
        yield "casts", _line(source)


def _used_by(node: _Place) -> Iterator[tuple[str, str]]:
    users = [entry for entry in node.listing.entries if node.entry.name in entry.inputs]
    for user in users[:_MOST_USERS]:
        yield "used by", _line(user)
    if len(users) > _MOST_USERS:
        yield "", f"... and {len(users) - _MOST_USERS} more"


def _chain(node: _Place, index: Index) -> Iterator[tuple[str, str]]:
    """Yield the inputs that gave the node its dtype, each node once, back to where that dtype starts."""
    names = {node.entry.name}
    waiting = [(1, source) for source in reversed(_forced_by(node.listing, node.entry, index))]
    label, shown = "follows", 0
    while waiting:
        depth, entry = waiting.pop()
        if entry.name in names:
            continue
        if shown == _LONGEST:
            yield "", f"... and on from {entry.name}: --why {entry.name}"
            return
        names.add(entry.name)
        shown += 1
        yield label, "  " * (depth - 1) + _line(entry)
        label = ""
        if entry.is_call and not entry.is_cast and (entry.rule is None or entry.overruled):
            waiting += [(depth + 1, source) for source in reversed(_forced_by(node.listing, entry, index))]


def _forced_by(listing: Listing, entry: Entry, index: Index) -> list[Entry]:
    """Return the inputs with the dtype of ``entry``; all its floating-point inputs if none has it."""
    inputs = index.inputs(listing, entry)
    same = [source for source in inputs if entry.dtype and source.dtype == entry.dtype]
    return same or [source for source in inputs if source.dtype in FLOATS]


def _line(entry: Entry) -> str:
    before = was_dtype(entry)
    dtype = f"{before} -> {entry.dtype}" if before not in ("", entry.dtype) else entry.dtype or "no tensor"
    return f"{entry.name}  {dtype}  {_origin(entry)}"


def _origin(entry: Entry) -> str:
    if entry.kind == "placeholder":
        return "input of the graph"
    if entry.kind == "get_attr":
        return f"attribute {entry.target}"
    if entry.kind == "output":
        return "what the graph returns"
    if entry.is_cast:
        return f"cast {entry.inserted}"
    if is_pick(entry):
        return "one of the results of"
    decided = f"rule {rule_name(entry.rule)}" if entry.rule is not None else entry.reason or entry.verbatim
    return f"{op_name(entry)}: {decided}" if decided else op_name(entry)
