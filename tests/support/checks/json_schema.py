"""Whether values fit a JSON Schema, by the keywords that the schemas of this repository use."""

import re
from typing import Any

TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "number": (int, float), "integer": int}


def fits(value: Any, schema: dict[str, Any], whole: dict[str, Any] | None = None) -> bool:
    """Whether ``value`` is valid; ``whole``: the schema that ``schema`` is a part of, with what it refers to."""
    whole = schema if whole is None else whole
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
    if "if" in schema and not fits(value, schema["if"], whole) and not fits(value, schema["else"], whole):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "anyOf" in schema and not any(fits(value, option, whole) for option in schema["anyOf"]):
        return False
    kinds = schema.get("type", [])
    if kinds and not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, (int, float)):
        return bool(value >= schema.get("minimum", value))
    if isinstance(value, list):
        return all(fits(item, schema.get("items", {}), whole) for item in value)
    return not isinstance(value, dict) or _object_fits(value, schema, whole)


def _is(value: Any, kind: str) -> bool:
    return kind == "boolean" if isinstance(value, bool) else isinstance(value, TYPES.get(kind, ()))


def _object_fits(value: dict[str, Any], schema: dict[str, Any], whole: dict[str, Any]) -> bool:
    known, other = schema.get("properties", {}), schema.get("additionalProperties", {})
    if any(key not in value for key in schema.get("required", ())) or len(value) < schema.get("minProperties", 0):
        return False
    if other is False and not value.keys() <= known.keys():
        return False
    return all(fits(item, known.get(key, other), whole) for key, item in value.items())
