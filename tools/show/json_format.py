"""``--format json``: all data of a listing, in a versioned format (``schema.json``).

Empty and unknown values are left out: ``""``, ``()``, ``{}`` and None.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from fxamp.graph_text.model import Document, Entry, KeptValue, Listing, RuleRef, Source, TensorType
from fxamp.graph_text.totals import Index, totals
from fxamp.tools.show.findings import Finding
from fxamp.tools.show.select import Keep, Selection, select

#: The name and version of the format; a change that breaks readers increases the number.
VERSION = "fxamp-show/1"

#: Totals that only policies for fp8 have.
_OF_FP8 = ("fp8", "not_fp8")

#: The fields that are written even if they are empty, by class.
_ALWAYS: Mapping[type, tuple[str, ...]] = {
    Listing: ("name",),
    Entry: ("name", "kind", "target"),
    TensorType: ("dtype", "shape"),
    RuleRef: ("id",),
    KeptValue: ("name", "shape"),
    Source: ("file", "line", "function", "code"),
    Finding: ("kind", "graph"),
}


def to_json(document: Document, selection: Selection | None = None, findings: Sequence[Finding] | None = None) -> str:
    """Return ``document``, or the part that ``selection`` keeps, as JSON in the format of ``schema.json``."""
    chosen = selection or select(document)
    graphs = []
    for number, listing in chosen.graphs:
        data = _graph(listing, Index(), chosen.shows)
        graphs.append({"number": number, **data, "totals": _totals(listing, chosen.scope)})
    problems = {} if findings is None else {"findings": list(map(_plain, findings))}
    data = {"schema": VERSION, **problems, "graphs": graphs, "warnings": list(document.warnings)}
    return json.dumps(data, ensure_ascii=False, indent=1) + "\n"


def _graph(listing: Listing, index: Index, keep: Keep) -> dict[str, Any]:
    bodies = {name: _graph(body, index, keep) for name, body in listing.bodies.items()}
    filled = {name for name, body in bodies.items() if body["nodes"]}
    shown = [entry for entry in listing.entries if keep(entry) or filled.intersection(entry.bodies)]
    about: dict[str, Any] = _plain(listing, entries=(), bodies=bodies)
    return about | {"nodes": [_node(listing, entry, index) for entry in shown]}


def _node(listing: Listing, entry: Entry, index: Index) -> dict[str, Any]:
    moved = index.bytes_cast(listing, entry) if entry.is_cast else None
    node: dict[str, Any] = _plain(entry, dtype=entry.dtype, bytes=moved)
    return node


def _plain(value: Any, **more: Any) -> Any:
    """Return a value in JSON's types: an object of a class with its fields and ``more``, without those left out.

    Numbers stay, even 0.
    """
    if isinstance(value, tuple):
        return list(map(_plain, value))
    if not is_dataclass(value):
        return value
    always, data = _ALWAYS[type(value)], vars(value) | more
    return {key: _plain(item) for key, item in data.items() if item or type(item) is int or key in always}


def _totals(listing: Listing, keep: Keep) -> dict[str, Any]:
    counted = vars(totals(listing, keep))
    return {key: value for key, value in counted.items() if value is not None and (value or key not in _OF_FP8)}
