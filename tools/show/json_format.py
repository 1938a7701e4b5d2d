"""``--format json``: all data of a listing, in a versioned format (``schema.json``).

Empty and unknown values are left out: ``""``, ``()``, ``{}`` and None.
"""

import json
from collections.abc import Sequence
from typing import Any

from fxamp.graph_text.model import Document, Entry, KeptValue, Listing, RuleRef, Source, TensorType
from fxamp.graph_text.totals import Index, totals
from fxamp.tools.show.findings import Finding
from fxamp.tools.show.select import Keep, Selection, select

#: The name and version of the format; a change that breaks readers increases the number.
VERSION = "fxamp-show/1"

#: Totals that only policies for fp8 have.
_OF_FP8 = ("fp8", "not_fp8")


def to_json(document: Document, selection: Selection | None = None, findings: Sequence[Finding] | None = None) -> str:
    """Return ``document``, or the part that ``selection`` keeps, as JSON in the format of ``schema.json``."""
    chosen = selection or select(document)
    graphs = []
    for number, listing in chosen.graphs:
        data = _graph(listing, Index(), chosen.shows)
        graphs.append({"number": number, **data, "totals": _totals(listing, chosen.scope)})
    problems = {} if findings is None else {"findings": list(map(_finding, findings))}
    data = {"schema": VERSION, **problems, "graphs": graphs, "warnings": list(document.warnings)}
    return json.dumps(data, ensure_ascii=False, indent=1) + "\n"


def _graph(listing: Listing, index: Index, keep: Keep) -> dict[str, Any]:
    bodies = {name: _graph(body, index, keep) for name, body in listing.bodies.items()}
    filled = {name for name, body in bodies.items() if body["nodes"]}
    shown = [entry for entry in listing.entries if keep(entry) or filled.intersection(entry.bodies)]
    data = {
        **vars(listing),
        "counts": dict(listing.counts),
        "unmatched": list(map(_rule, listing.unmatched)),
        "kept": list(map(_kept, listing.kept)),
        "entries": (),
        "bodies": bodies,
    }
    return {"name": listing.name, **_some(data), "nodes": [_node(listing, entry, index) for entry in shown]}


def _node(listing: Listing, entry: Entry, index: Index) -> dict[str, Any]:
    data = {
        **vars(entry),
        "values": list(map(_tensor, entry.values)),
        "dtype": entry.dtype,
        "bytes": index.bytes_cast(listing, entry) if entry.is_cast else None,
        "source": _source(entry.source),
        "rule": _rule(entry.rule) if entry.rule is not None else None,
        "lost": list(map(_rule, entry.lost)),
    }
    return {"name": entry.name, "kind": entry.kind, "target": entry.target, **_some(data)}


def _tensor(value: TensorType) -> dict[str, Any]:
    return {"dtype": value.dtype, "shape": list(value.shape), **_some({"device": value.device})}


def _rule(rule: RuleRef) -> dict[str, Any]:
    return {"id": rule.id, **_some(vars(rule))}


def _kept(value: KeptValue) -> dict[str, Any]:
    rule = None if value.rule is None else _rule(value.rule)
    return {"name": value.name, "shape": list(value.shape), **_some({**vars(value), "rule": rule, "shape": None})}


def _source(source: Source | None) -> dict[str, Any] | None:
    return None if source is None else dict(vars(source))


def _finding(finding: Finding) -> dict[str, Any]:
    data = {**vars(finding), "source": _source(finding.source)}
    return {"kind": finding.kind, "graph": finding.graph, **_some(data)}


def _totals(listing: Listing, keep: Keep) -> dict[str, Any]:
    counted = vars(totals(listing, keep))
    return {key: value for key, value in counted.items() if value is not None and (value or key not in _OF_FP8)}


def _some(data: dict[str, Any]) -> dict[str, Any]:
    """Return ``data`` without empty and unknown values; numbers stay, even 0."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in data.items()
        if value or type(value) is int
    }
