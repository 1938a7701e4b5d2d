"""policies/schema.json says what the loader accepts, as far as JSON Schema can."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from broken_policies import BROKEN, parsed

from fxamp.policy.file.json_schema import json_schema
from fxamp.policy.file.paths import folder

SCHEMA = json.loads((folder() / "schema.json").read_text())

TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "number": (int, float), "integer": int}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether ``value`` is valid: the keywords of JSON Schema that the schema uses."""
    if "if" in schema and not fits(value, schema["if"]) and not fits(value, schema["else"]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "anyOf" in schema and not any(fits(value, option) for option in schema["anyOf"]):
        return False
    kinds = schema.get("type", [])
    if kinds and not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, (int, float)):
        return bool(value >= schema.get("minimum", value))
    if isinstance(value, list):
        return all(fits(item, schema.get("items", {})) for item in value)
    return not isinstance(value, dict) or _object_fits(value, schema)


def _is(value: Any, kind: str) -> bool:
    return kind == "boolean" if isinstance(value, bool) else isinstance(value, TYPES.get(kind, ()))


def _object_fits(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    known, other = schema.get("properties", {}), schema.get("additionalProperties", {})
    if any(key not in value for key in schema.get("required", ())) or len(value) < schema.get("minProperties", 0):
        return False
    if other is False and not value.keys() <= known.keys():
        return False
    return all(fits(item, known.get(key, other)) for key, item in value.items())


def test_the_file_is_what_the_tables_make() -> None:
    assert json_schema() == SCHEMA, "run python -m fxamp.policy.file.json_schema > policies/schema.json"
    assert {"if", "else", "enum", "anyOf"} <= set(re.findall(r'"(\w+)":', json.dumps(SCHEMA)))


def test_every_key_is_described() -> None:
    for table in (SCHEMA, SCHEMA["properties"]["match"], SCHEMA["properties"]["rule"]["items"]):
        assert [key for key, about in table["properties"].items() if not about.get("description")] == []


@pytest.mark.parametrize("path", sorted(folder().glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_policies_fit(path: Path) -> None:
    data = tomllib.loads(path.read_text())
    data.pop("variant", None)  # which no user's file may have
    assert fits(data, SCHEMA)


def test_it_refuses_what_the_loader_refuses() -> None:
    contents = {name: parsed(broken.text) for name, broken in BROKEN.items()}
    accepted = {name for name, content in contents.items() if content is not None and fits(content, SCHEMA)}
    assert accepted == {name for name, broken in BROKEN.items() if broken.beyond_schema}
