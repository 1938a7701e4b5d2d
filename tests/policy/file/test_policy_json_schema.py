"""policies/schema.json says what the loader accepts, as far as JSON Schema can."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from broken_policies import BROKEN, parsed
from support.checks.json_schema import fits

from fxamp.policy.file.json_schema import json_schema
from fxamp.policy.file.paths import folder

SCHEMA = json.loads((folder() / "schema.json").read_text())


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
