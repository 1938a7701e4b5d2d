"""``--format model-explorer``: a graph collection for Google's Model Explorer.

The format is defined by ``input_graph.ts`` (a file: a label and graphs) and ``graph_builder.py`` (the fields of a node)
of github.com/google-ai-edge/model-explorer. All attribute values are strings.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from fxamp.graph_text.model import Document, Entry, Listing
from fxamp.graph_text.totals import Index, is_pick, was_dtype
from fxamp.tools.common.formatting import op_name, place, rule_name

#: Background colours by dtype, and the border of inserted casts.
_BACKGROUND = {"f16": "#cfe8fc", "bf16": "#cfe8fc", "f32": "#fdf0c8", "f64": "#f9d5d3"}
_CAST_BORDER = "#8e24aa"

_PICKED = re.compile(r"(?:\[|, )(\d+)[\])]$")


def to_model_explorer(document: Document, label: str) -> str:
    """Return ``document`` as JSON of one graph collection; ``label`` is its name in Model Explorer's list."""
    graphs = [graph for number, listing in enumerate(document.graphs) for graph in _graphs(listing, f"graph {number}")]
    return json.dumps({"label": label, "graphs": graphs}, ensure_ascii=False, indent=1) + "\n"


def _graphs(listing: Listing, name: str) -> Iterator[dict[str, Any]]:
    index = Index()
    classes = {_namespace(entry): entry.module_class for entry in listing.entries if entry.module_class}
    graph: dict[str, Any] = {"id": name, "nodes": [_node(listing, entry, name, index) for entry in listing.entries]}
    if classes:
        graph["groupNodeAttributes"] = {space: {"class": cls} for space, cls in classes.items()}
    yield graph
    for body, inner in listing.bodies.items():
        yield from _graphs(inner, f"{name}/{body}")


def _node(listing: Listing, entry: Entry, graph: str, index: Index) -> dict[str, Any]:
    node: dict[str, Any] = {
        "id": entry.name,
        "label": _label(listing, entry, index),
        "namespace": _namespace(entry),
        "subgraphIds": [f"{graph}/{body}" for body in entry.bodies if body in listing.bodies],
        "attrs": [{"key": key, "value": value} for key, value in _attributes(listing, entry, index) if value],
        "incomingEdges": [_edge(entry, source, at) for at, source in enumerate(index.inputs(listing, entry))],
        "outputsMetadata": [
            {"id": str(at), "attrs": [{"key": "tensor_shape", "value": str(value)}]}
            for at, value in enumerate(entry.values)
        ],
    }
    style = _style(entry)
    return {**node, "style": style} if style else node


def _label(listing: Listing, entry: Entry, index: Index) -> str:
    if entry.is_cast:
        return f"cast {index.cast_from(listing, entry) or '?'} to {entry.dtype}"
    return op_name(entry) if entry.is_call else entry.name


def _namespace(entry: Entry) -> str:
    if entry.kind == "placeholder":
        return "inputs"
    return entry.module.replace(".", "/")


def _attributes(listing: Listing, entry: Entry, index: Index) -> Iterator[tuple[str, str]]:
    moved = index.bytes_cast(listing, entry) if entry.is_cast else None
    yield "dtype", entry.runs_in
    yield "dtype as captured", was_dtype(entry)
    yield "call", entry.call
    yield "source", place(entry.source)
    yield "code", entry.source.code if entry.source is not None else ""
    yield "module class", entry.module_class
    yield "rule", rule_name(entry.rule)
    yield "reason", entry.reason
    yield "lost", ", ".join(rule_name(rule) for rule in entry.lost)
    yield "overruled", entry.overruled
    yield "not in fp8", entry.not_fp8
    yield "autocast region", entry.region
    yield "inserted", entry.inserted
    yield "verbatim", entry.verbatim
    yield "bytes cast", "" if moved is None else str(moved)


def _edge(entry: Entry, source: Entry, at: int) -> dict[str, str]:
    picked = _PICKED.search(entry.call) if is_pick(entry) else None
    return {
        "sourceNodeId": source.name,
        "sourceNodeOutputId": picked[1] if picked else "0",
        "targetNodeInputId": str(at),
    }


def _style(entry: Entry) -> dict[str, str]:
    style = {}
    if entry.is_call and entry.dtype in _BACKGROUND:
        style["backgroundColor"] = _BACKGROUND[entry.dtype]
    if entry.is_cast:
        style["borderColor"] = _CAST_BORDER
    return style
