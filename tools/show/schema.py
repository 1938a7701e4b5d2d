"""Validate JSON against ``schema.json``; supports only the parts of JSON Schema that this file uses."""

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

_KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
}


@cache
def schema() -> dict[str, Any]:
    """Return the schema of ``--format json``."""
    text = (files("fxamp.tools.show") / "schema.json").read_text(encoding="utf-8")
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def mistakes(data: object) -> Iterator[str]:
    """Yield each violation of the schema in ``data``, with its place: ``graphs[0].nodes[3]: ...``."""
    yield from _check(data, schema(), "")


def _check(data: object, rule: dict[str, Any], at: str) -> Iterator[str]:
    if "$ref" in rule:
        rule = schema()["$defs"][rule["$ref"].rpartition("/")[2]]
    if "const" in rule and data != rule["const"]:
        yield f"{at or 'the file'}: {data!r} is not {rule['const']!r}"
    if "enum" in rule and data not in rule["enum"]:
        yield f"{at}: {data!r} is not one of {', '.join(rule['enum'])}"
    if "type" in rule and not _is_a(data, rule["type"]):
        yield f"{at or 'the file'}: {type(data).__name__} where {rule['type']} is expected"
        return
    if isinstance(data, dict):
        yield from _check_object(data, rule, at)
    elif isinstance(data, list) and "items" in rule:
        for number, item in enumerate(data):
            yield from _check(item, rule["items"], f"{at}[{number}]")


def _check_object(data: dict[str, Any], rule: dict[str, Any], at: str) -> Iterator[str]:
    inside = f"{at}." if at else ""
    for key in rule.get("required", ()):
        if key not in data:
            yield f"{at or 'the file'}: {key!r} is missing"
    known, others = rule.get("properties", {}), rule.get("additionalProperties", True)
    for key, value in data.items():
        if key in known:
            yield from _check(value, known[key], inside + key)
        elif isinstance(others, dict):
            yield from _check(value, others, inside + key)
        elif not others:
            yield f"{at or 'the file'}: {key!r} is unknown; accepted: {', '.join(known)}"


def _is_a(data: object, kind: str | list[str]) -> bool:
    if isinstance(kind, list):
        return any(_is_a(data, one) for one in kind)
    if isinstance(data, bool):
        return kind == "boolean"
    return isinstance(data, _KINDS[kind])
