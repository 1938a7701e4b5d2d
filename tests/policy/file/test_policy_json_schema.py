"""policies/schema.json says what the loader accepts, as far as JSON Schema can."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from test_policy_broken import BROKEN
from test_policy_mistakes import BROKEN as PLAIN

from fxamp.policy.file.json_schema import json_schema
from fxamp.policy.file.paths import folder

SCHEMA = json.loads((folder() / "schema.json").read_text())

TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "number": (int, float), "integer": int}

BEYOND = {
    "a condition without what it is for": (
        *(
            "capability of a CPU",
            "architecture of a CPU",
            "features of a GPU",
            "advice without ban",
            "a recipe without fp8",
        ),
    ),
    "values that depend on others": ("bounds that cross", "start below the floor", "inputs of a promotion"),
    "words that depend on others": (
        *("promote in the backward", "banned without advice", "fp8 in the backward", "fp8 without a recipe"),
        *("fp8 without ops", "fp8 of a softmax"),
    ),
    "keys that do not go together": (
        *("gradients alone", "chunks in the backward", "chunks with cast"),
        *("keep without region", "elements of an op", "readers of an op", "cast of a kept value"),
        *(
            "inputs of a kept value",
            "reduces of a kept value",
            "block of 16 bits",
            "recompute at random",
            "recipe of a kept value",
        ),
    ),
    "emptiness": (
        "no features",
        "no modules",
        "no dtypes",
        "empty ops",
        "empty id",
        "blank id",
        "empty op",
        "empty module",
    ),
    "ranges of numbers": (
        *("negative scale", "infinite scale", "scale above float32", "shrinking growth", "growing back-off"),
        "multiple of nothing",
    ),
    "names and globs": (
        *("op with a space", "op on a later line", "op in no style", "module with a space"),
        *("module of dots", "class with a space", "reserved id", "id twice", "two ellipses"),
    ),
    "other files": ("missing file", "extends itself", "removed but never there", "no device", "no dtype"),
}


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


def parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


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
    data = {case: parsed(text) for case, (text, *_) in (PLAIN | BROKEN).items()}
    accepted = {case for case, content in data.items() if content is not None and fits(content, SCHEMA)}
    assert accepted == {case for cases in BEYOND.values() for case in cases}
