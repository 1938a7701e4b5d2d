"""``--format json``: all data of a listing, in a versioned format (``schema.json``), and its reader.

Empty and unknown values are left out: ``""``, ``()``, ``{}`` and None.
"""

import json
from collections.abc import Sequence
from typing import Any

from fxamp.errors import ListingError
from fxamp.graph_text.model import Document, Entry, KeptValue, Listing, RuleRef, Source, TensorType
from fxamp.graph_text.totals import Index, totals
from fxamp.tools.show.findings import Finding
from fxamp.tools.show.schema import mistakes
from fxamp.tools.show.select import Keep, Selection, select

#: The name and version of the format; a change that breaks readers increases the number.
VERSION = "fxamp-show/1"

#: Totals that only policies for fp8 have.
_OF_FP8 = ("fp8", "not_fp8")

_DERIVED = ("dtype", "bytes")


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


def from_json(text: str, name: str = "JSON") -> Document:
    """Return the document that :func:`to_json` wrote; ``name`` is the input's name for errors.

    Raises ListingError with the place where the text does not match the schema.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ListingError(f"{name}:{error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:  # an integer whose digits are too many for Python
        raise ListingError(f"{name}: it holds a number of more than 64 bits") from error
    except RecursionError as error:
        raise ListingError(f"{name}: nested too deeply to be a graph") from error
    if not isinstance(data, dict) or data.get("schema") != VERSION:
        raise ListingError(f'{name}: not JSON of fxamp-show; accepted: an object with "schema": {VERSION!r}')
    for mistake in mistakes(data):
        raise ListingError(f"{name}: {mistake}")
    return Document(tuple(map(_listing, data["graphs"])), tuple(data["warnings"]))


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
    """Return ``data`` without empty and unknown values; numbers stay, also 0."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in data.items()
        if value or type(value) is int
    }


def _listing(data: dict[str, Any]) -> Listing:
    own = {
        key: value
        for key, value in data.items()
        if key not in ("number", "totals", "nodes", "bodies", "unmatched", "kept")
    }
    return Listing(
        **own,
        entries=tuple(map(_entry, data["nodes"])),
        bodies={name: _listing(body) for name, body in data.get("bodies", {}).items()},
        unmatched=tuple(RuleRef(**rule) for rule in data.get("unmatched", ())),
        kept=tuple(map(_kept_value, data.get("kept", ()))),
    )


def _kept_value(data: dict[str, Any]) -> KeptValue:
    rule = RuleRef(**data["rule"]) if "rule" in data else None
    own = {"module": "", "before": None, "after": None, **data, "shape": tuple(data["shape"]), "rule": rule}
    return KeptValue(**own)


def _entry(data: dict[str, Any]) -> Entry:
    own: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key not in _DERIVED
    }
    own["values"] = tuple(
        TensorType(value["dtype"], tuple(value["shape"]), value.get("device", "")) for value in data.get("values", ())
    )
    own["lost"] = tuple(RuleRef(**rule) for rule in data.get("lost", ()))
    if "rule" in data:
        own["rule"] = RuleRef(**data["rule"])
    if "source" in data:
        own["source"] = Source(**data["source"])
    return Entry(**own)
