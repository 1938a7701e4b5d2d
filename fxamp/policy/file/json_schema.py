"""The JSON Schema of policy files, for editors: ``python -m fxamp.policy.file.json_schema > policies/schema.json``.

It is generated from the tables that the loader checks files with, so an editor accepts the same keys and values. A
schema cannot express every constraint (circular extends, an id used twice); ``fxamp-policy check`` checks those too.
"""

import json
from collections.abc import Mapping
from typing import Any

from fxamp.policy.file.schema import CONDITIONS, FILE_KEYS, KINDS, RULE_KEYS, TABLES
from fxamp.policy.model.keys import Key, enum
from fxamp.policy.model.rule import Rule


def json_schema() -> dict[str, Any]:
    """Return the schema (JSON Schema, draft 7: what Taplo and Even Better TOML read)."""
    parts: dict[str, Any] = {name: _object(keys) for name, keys in TABLES.items()}
    parts["rule"] = {"type": "array", "items": _rule()}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "fxamp policy"}
    return head | _object(FILE_KEYS, parts)


def _rule() -> dict[str, Any]:
    whole = {"anyOf": [{"required": [key]} for key in CONDITIONS]} | _one_of(*KINDS)
    off = {"properties": {"enabled": {"const": False}}, "required": ["enabled"]}
    return _object(RULE_KEYS) | {"required": ["id"], "if": off, "else": whole}


def _one_of(*kinds: type[Rule]) -> dict[str, Any]:
    """Return the schema of a rule of one of ``kinds``; a rule without a kind's key is checked as the first."""
    last = kinds[-1]
    whole = {"properties": {"region": enum(tuple(last.regions))}, "required": [last.main_key]}
    return whole if len(kinds) == 1 else {"if": whole, "else": _one_of(*kinds[:-1])}


def _object(keys: Mapping[str, Key], parts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the schema of a table; ``parts``: the schemas of the tables in it."""
    properties = {name: _property(key) | (parts or {}).get(name, {}) for name, key in keys.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _property(key: Key) -> dict[str, Any]:
    about = {"description": key.about} if key.about else {}
    return {**about, "enum": list(key.choices)} if key.choices else {**about, **key.kind.json}


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
