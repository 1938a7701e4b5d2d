"""The data of the page: every node with its decision, as plain names and numbers for the scripts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fxamp.graph_text import Document, Entry, Listing, RuleRef, Source
from fxamp.graph_text.totals import Index, changed, is_op, is_pick, totals, was_dtype
from fxamp.tools.common.formatting import op_name, overruled, place
from fxamp.tools.common.numbered_rows import combined
from fxamp.tools.show.select import select
from fxamp.tools.show.summary import summary

#: Number of source lines shown before and after a line that created a node.
_AROUND = 4


def page_data(document: Document, title: str) -> dict[str, Any]:
    """Return the page's data: the graphs, and the lines of the source files that created their nodes."""
    return {
        "title": title,
        "warnings": list(document.warnings),
        "graphs": [
            _graph(listing, number) | {"summary": summary(listing, number, select(document))}
            for number, listing in enumerate(document.graphs)
        ],
        "sources": _sources(document),
    }


def _graph(listing: Listing, number: int) -> dict[str, Any]:
    counts = totals(listing)
    return {
        "name": f"graph {number}" + (f", {listing.stage}" if listing.stage else ""),
        "policy": listing.policy,
        "device": listing.device,
        "chosen": listing.chosen,
        "ended": listing.ended,
        "kept": [listing.kept_before, listing.kept_after],
        "kept_modules": _kept_by_module(listing),
        "kept_values": [[value.module, value.name, value.form, value.before, value.after] for value in listing.kept],
        "totals": {
            "ops": counts.ops,
            "dtypes": dict(counts.ops_by_dtype),
            "casts": counts.casts,
            "bytes": counts.cast_bytes,
            "unknown": counts.casts_of_unknown_size,
            "shared": counts.shared,
            "folded": counts.folded,
        },
        "nodes": list(_nodes(listing, "", Index())),
    }


def _kept_by_module(listing: Listing) -> list[list[str | int]]:
    """Return what each module keeps for the backward: its path, bytes before and after, the largest first.

    Modules that differ in numbers only are one, ``h.*.attn``, with the sum of all.
    """
    groups = combined(listing.kept, lambda value: value.module, lambda value: None)
    rows: list[list[str | int]] = [
        [group.module, sum(value.before or 0 for value in group.items), sum(value.after or 0 for value in group.items)]
        for group in groups
    ]
    return sorted(rows, key=lambda row: -int(row[2]))


def _nodes(listing: Listing, within: str, index: Index) -> Iterator[dict[str, Any]]:
    """Yield the nodes of a graph, those of a body directly after its op; their names start with ``BODY/``."""
    for entry in listing.entries:
        yield _node(listing, entry, within, index)
        for body in entry.bodies:
            if body in listing.bodies:
                yield from _nodes(listing.bodies[body], f"{within}{entry.name}/{body}/", index)


def _node(listing: Listing, entry: Entry, within: str, index: Index) -> dict[str, Any]:
    node = {
        "id": within + entry.name,
        "name": entry.name,
        "in": within,
        "kind": _kind(entry),
        "op": op_name(entry),
        "call": entry.call,
        "inputs": [within + name for name in entry.inputs],
        "dtype": entry.runs_in,
        "was": was_dtype(entry) if changed(entry) else "",
        "types": [str(value) for value in entry.values],
        "module": entry.module,
        "class": entry.module_class,
        "file": entry.source.file if entry.source else "",
        "line": entry.source.line if entry.source else 0,
        "code": entry.source.code if entry.source else "",
        "place": place(entry.source),
        "rule": _rule(entry.rule),
        "lost": [_rule(rule) for rule in entry.lost],
        "reason": entry.inserted or entry.reason,
        "overruled": overruled(entry),
        "region": entry.region,
        "verbatim": entry.verbatim,
        "bytes": index.bytes_cast(listing, entry) if entry.is_cast else None,
        "param": entry.needs_grad or "parameters" in entry.name or entry.name.startswith("primals_"),
        "bodies": list(entry.bodies),
        "counts": is_op(entry),
    }
    return {key: value for key, value in node.items() if value not in ("", 0, None, [], False)}


def _kind(entry: Entry) -> str:
    """Return how it is drawn: an input, a constant, an op, a cast (on an edge), a getitem (hidden), an output."""
    if entry.kind in ("placeholder", "get_attr", "output"):
        return {"placeholder": "input", "get_attr": "constant", "output": "output"}[entry.kind]
    if entry.is_cast:
        return "cast"
    return "pick" if is_pick(entry) or entry.symbol else "op"


def _rule(rule: RuleRef | None) -> dict[str, str] | None:
    return None if rule is None else {"id": rule.id, "at": rule.origin, "cast": rule.cast, "why": rule.why}


def _sources(document: Document) -> dict[str, dict[str, str]]:
    """Return, by file, the text of the lines around those that created nodes, by line number."""
    places: dict[str, set[int]] = {}
    for listing in document.graphs:
        for _, entry in listing.walk():
            if entry.source is not None:
                lines = places.setdefault(entry.source.file, set())
                lines.update(range(entry.source.line - _AROUND, entry.source.line + _AROUND + 1))
    texts = {file: _lines(file, numbers) for file, numbers in sorted(places.items())}
    return {file: lines or _quoted(document, file) for file, lines in texts.items()}


def _lines(file: str, numbers: set[int]) -> dict[str, str]:
    try:
        text = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}  # the graph may come from another machine; the page then shows only the lines in the dump
    return {str(number): text[number - 1] for number in sorted(numbers) if 0 < number <= len(text)}


def _quoted(document: Document, file: str) -> dict[str, str]:
    sources: set[Source] = {e.source for graph in document.graphs for _, e in graph.walk() if e.source is not None}
    lines = {source.line: source.code for source in sources if source.file == file}
    return {str(line): lines[line] for line in sorted(lines)}
