"""Write a listing as text, in the form of ``GraphModule.print_readable``; :mod:`fxamp.graph_text.parse` reads it back.

The text is Python that is never run. It depends only on the listing: the same graph gives the same text. It contains
the whole listing, except the source lines of inputs.
"""

from collections.abc import Iterator

from fxamp.graph_text.comments import write_comment
from fxamp.graph_text.model import Entry, KeptValue, Listing, RuleRef

#: The version of the comment format.
FORMAT = "1"

_INDENT = "    "


def write_listing(listing: Listing, number: int | None = None) -> str:
    """Return the text of ``listing`` and its bodies; ``number`` is the graph's index in its program."""
    graph = "" if number is None else str(number)
    lines = [write_comment([("format", FORMAT), ("graph", graph), *_graph_fields(listing)])]
    lines += [write_comment([("unmatched", write_rule(rule))]) for rule in listing.unmatched]
    lines += [write_comment([("kept", write_kept(value))]) for value in listing.kept]
    return "\n".join([*lines, *_class(listing, listing.name or "GraphModule", "")]) + "\n"


def _graph_fields(listing: Listing) -> Iterator[tuple[str, str]]:
    yield "stage", listing.stage
    yield "policy", listing.policy
    yield "device", listing.device
    yield "chosen", listing.chosen
    for name, count in sorted(listing.counts.items()):
        yield "count", f"{name} {count}"
    yield "ended", listing.ended
    yield "kept_before", "" if listing.kept_before is None else str(listing.kept_before)
    yield "kept_after", "" if listing.kept_after is None else str(listing.kept_after)


def _class(listing: Listing, name: str, indent: str) -> Iterator[str]:
    inputs = [entry for entry in listing.entries if entry.kind == "placeholder"]
    body = indent + _INDENT
    yield f"{indent}class {name}(torch.nn.Module):"
    for entry in inputs:
        fields = list(_entry_fields(entry))
        if any(value for _, value in fields):
            yield body + write_comment([("input", entry.name), *fields])
    yield f"{body}def forward({', '.join(['self', *map(_parameter, inputs)])}):"
    for entry in listing.entries:
        if entry.kind != "placeholder":
            yield from (f"{body}{_INDENT}{line}" if line else "" for line in _statement(entry))
    for attribute, inner in listing.bodies.items():
        yield ""
        yield from _class(inner, attribute, body)


def _parameter(entry: Entry) -> str:
    """Return the entry's name with its types, as a parameter and a target of an assignment have it."""
    annotation = _annotation(entry)
    return f'{entry.name}: "{annotation}"' if annotation else entry.name


def _statement(entry: Entry) -> Iterator[str]:
    if entry.source is not None:
        where = entry.source
        yield ""
        yield f"# File: {where.file}:{where.line} in {where.function}, code: {' '.join(where.code.split())}"
    fields = list(_entry_fields(entry))
    if any(value for _, value in fields):
        yield write_comment(fields)
    if entry.kind == "output":
        yield f"return {entry.call}"
        return
    yield f"{_parameter(entry)} = {entry.call}"


def _annotation(entry: Entry) -> str:
    if entry.symbol:
        return f"Sym({entry.symbol})"
    return f"{entry.values[0]}{entry.values[0].device}" if len(entry.values) == 1 else ""


def _entry_fields(entry: Entry) -> Iterator[tuple[str, str]]:
    if entry.kind == "output" and entry.name != "output":
        yield "name", entry.name  # a return statement cannot contain it
    yield "module", entry.module
    yield "class", entry.module_class
    if len(entry.values) > 1:
        yield "values", "; ".join(f"{value}{value.device}" for value in entry.values)
    yield "was", ",".join(entry.was)
    yield "needs_grad", "1" if entry.needs_grad else ""
    if entry.rule is not None:
        yield "rule", entry.rule.id
        yield "at", entry.rule.origin
        yield "cast", entry.rule.cast
        yield "why", entry.rule.why
    for rule in entry.lost:
        yield "lost", write_rule(rule)
    if entry.rule is None or entry.reason != entry.rule.why:
        yield "reason", entry.reason
    yield "overruled", entry.overruled
    yield "region", entry.region
    yield "inserted", entry.inserted
    yield "verbatim", entry.verbatim
    yield "not_fp8", entry.not_fp8


def write_rule(rule: RuleRef) -> str:
    r"""Return ``rule`` as one value of a comment: ``id|origin|cast|why``; a ``|`` or ``\`` inside a part is escaped."""
    return _joined(rule.id, rule.origin, rule.cast, rule.why)


def write_kept(value: KeptValue) -> str:
    """Return ``value`` as one value of a comment: its fields in order, then the rule's, if there is one."""
    shape = ",".join(map(str, value.shape))
    sizes = ("" if size is None else str(size) for size in (value.before, value.after))
    rule = value.rule
    of_rule = () if rule is None else (rule.id, rule.origin, rule.cast, rule.why)
    place = value.name, value.op, value.module, value.dtype, shape, value.form
    return _joined(*place, *sizes, value.reason, *of_rule)


def _joined(*parts: str) -> str:
    return "|".join(part.replace("\\", "\\\\").replace("|", "\\|") for part in parts)
