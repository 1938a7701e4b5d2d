"""The effect of two policies on one graph: the ops whose dtype or rule changes, and the casts, in total and by module.

Both policies are applied to the graph as fxamp-show applies one; nothing is computed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fxamp.errors import BannedOpError, PolicyError
from fxamp.graph_text.model import Entry, Listing
from fxamp.graph_text.totals import Totals, is_op, totals
from fxamp.tools.common.output import notice
from fxamp.tools.common.silence import in_one_line, quiet
from fxamp.tools.diff.sides import PROG, Side
from fxamp.tools.inputs.load import Request, prepare
from fxamp.tools.inputs.prepare import ProgramGraph


@dataclass(frozen=True)
class OpEffect:
    """One op whose dtype or rule changes; None on the side that lacks it. ``body``: the body that contains it."""

    body: str
    old: Entry | None
    new: Entry | None

    @property
    def entry(self) -> Entry:
        """Return the op under the new policy, else under the old one."""
        entry = self.new or self.old
        assert entry is not None
        return entry

    @property
    def dtypes(self) -> tuple[str, str]:
        """Return the dtypes that it runs in, old and new; ``""`` if it is missing."""
        return self.old.runs_in if self.old else "", self.new.runs_in if self.new else ""

    @property
    def rules(self) -> tuple[str, str]:
        """Return the ids of the rules that apply, old and new; ``""`` if none applies."""
        old, new = (entry.rule.id if entry is not None and entry.rule else "" for entry in (self.old, self.new))
        return old, new


@dataclass(frozen=True)
class Effect:
    """The effect on one graph. ``sums`` are the totals under each policy, ``kept`` the bytes kept for the backward.

    ``modules`` maps the path of each module that differs to its two totals. ``rejections`` say why a policy rejects
    the graph (a banned op), ``""`` if it does not; a rejected graph is not compared.
    """

    file: str
    graph: str
    rejections: tuple[str, str] = ("", "")
    ops: tuple[OpEffect, ...] = ()
    sums: tuple[Totals, Totals] | None = None
    kept: tuple[int | None, int | None] = (None, None)
    modules: tuple[tuple[str, Totals, Totals], ...] = ()

    def content(self) -> dict[str, Any]:
        """Return the effect as plain data."""
        written: dict[str, Any] = {"file": self.file, "graph": self.graph}
        if any(self.rejections):
            return written | {"refused": _pair(*(why or None for why in self.rejections))}
        assert self.sums is not None
        return written | {
            "ops": [_op_content(op) for op in self.ops],
            "totals": _pair(*map(_sums, self.sums)),
            "kept_for_backward": _pair(*self.kept),
            "modules": [{"module": path, **_pair(*map(_sums, sums))} for path, *sums in self.modules],
        }


def effects(file: str, old: Side, new: Side, trust: bool) -> Iterator[Effect]:
    """Apply both policies to every graph of ``file``.

    Raises ListingError for a file without a graph to which policies can be applied, PolicyError if the graph is for a
    device that neither policy is for.
    """
    warned: dict[str, None] = {}
    for graph in prepare(file, Request(trust=trust, prog=PROG)):
        warned |= dict.fromkeys(graph.warnings)
        accepted = {"", "cpu", old.policy.device, new.policy.device}
        if graph.device not in accepted:
            raise PolicyError(
                f"{file} runs on {graph.device!r}, and neither policy is for it; accepted: a policy for it"
            )
        with quiet(), in_one_line(f"{file}: {graph.name} cannot be rewritten"):
            effect = _effect(file, graph, old, new)
        yield effect
    for text in warned:
        notice(f"{PROG}: warning: {text}")


def _effect(file: str, graph: ProgramGraph, old: Side, new: Side) -> Effect:
    before, after = _listing(graph, old), _listing(graph, new)
    if isinstance(before, str) or isinstance(after, str):
        return Effect(
            file, graph.name, (before if isinstance(before, str) else "", after if isinstance(after, str) else "")
        )
    return Effect(
        file,
        graph.name,
        ops=tuple(_changed_ops(before, after)),
        sums=(totals(before), totals(after)),
        kept=(before.kept_after, after.kept_after),
        modules=tuple(_changed_modules(before, after)),
    )


def _listing(graph: ProgramGraph, side: Side) -> Listing | str:
    """Return the graph under a policy, or why the policy rejects it."""
    try:
        return graph.listing(side.policy, "compared by fxamp-diff")
    except BannedOpError as error:
        return " ".join(str(error).split())


def _changed_ops(old: Listing, new: Listing) -> Iterator[OpEffect]:
    before, after = _ops(old), _ops(new)
    for key in dict.fromkeys([*after, *before]):
        change = OpEffect("/".join(key[:-1]), before.get(key), after.get(key))
        if change.old is None or change.new is None or change.dtypes[0] != change.dtypes[1] or _ruled(change):
            yield change


def _ruled(change: OpEffect) -> bool:
    """Whether a different cast is requested, even if the op runs in the same dtype."""
    old, new = (entry.rule.cast if entry is not None and entry.rule else "" for entry in (change.old, change.new))
    return old != new


def _ops(listing: Listing, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Entry]:
    """Return the ops of a graph and its bodies, by name after the names of those bodies."""
    ops: dict[tuple[str, ...], Entry] = {}
    for entry in listing.entries:
        if is_op(entry):
            ops[(*path, entry.name)] = entry
        for body in entry.bodies:
            if body in listing.bodies:
                ops |= _ops(listing.bodies[body], (*path, body))
    return ops


def _changed_modules(old: Listing, new: Listing) -> Iterator[tuple[str, Totals, Totals]]:
    paths = dict.fromkeys(entry.module for listing in (old, new) for _, entry in listing.walk() if entry.is_call)
    for path in paths:
        before, after = _within(old, path), _within(new, path)
        if _sums(before) != _sums(after):
            yield path, before, after


def _within(listing: Listing, module: str) -> Totals:
    return totals(listing, lambda entry: entry.module == module)


def _sums(sums: Totals) -> dict[str, Any]:
    return {
        "ops_by_dtype": dict(sorted(sums.ops_by_dtype.items())),
        "casts": sums.casts,
        "cast_bytes": sums.cast_bytes,
        "casts_of_unknown_size": sums.casts_of_unknown_size,
    }


def _op_content(op: OpEffect) -> Mapping[str, Any]:
    entry = op.entry
    return {
        "node": entry.name,
        "body": op.body,
        "source": str(entry.source or ""),
        "module": entry.module,
        "op": entry.target,
        "dtype": _pair(*op.dtypes),
        "rule": _pair(*op.rules),
    }


def _pair(old: Any, new: Any) -> dict[str, Any]:
    return {"old": old, "new": new}
