"""Check one parsed policy file against the schema, and collect every mistake with its line."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fxamp.policy.file import schema
from fxamp.policy.file.check_rule import Removal, check_rule
from fxamp.policy.file.checker import Checker
from fxamp.policy.file.lines import LineIndex
from fxamp.policy.file.paths import is_built_in
from fxamp.policy.model import optimizer_table
from fxamp.policy.model.loss_scale import mistakes
from fxamp.policy.model.rule import Origin, Rule


@dataclass(frozen=True)
class Variant:
    """The table ``[variant]``, which only shipped files have: the policies that it extends, and its purpose."""

    of: list[str]
    what: str


@dataclass
class PolicyFile:
    """The content of one file.

    ``extends`` pairs each name with its line. ``tables`` are those that the file has, by name; the keys outside of
    tables are under "". ``origins`` has the line of each key, as :func:`origin_key` spells it. ``rules`` are in the
    file's order.
    """

    shown: str
    extends: list[tuple[str, int]] = field(default_factory=list)
    variant: Variant | None = None
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    rules: list[Rule | Removal] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def mistake(self, line: int, message: str) -> None:
        """Record a mistake as ``file:line: message``."""
        self.mistakes.append(f"{self.shown}:{line}: {message}")


def origin_key(table: str, key: str = "") -> str:
    """Return the name of a setting in ``origins``: "device" of ``[match]``, but "loss_scale.init_scale"."""
    return key if table in ("", "match") else f"{table}.{key}".removesuffix(".")


def check_file(shown: str, data: dict[str, Any], lines: LineIndex) -> PolicyFile:
    """Return the content of a parsed file with all mistakes; entries with a mistake are left out."""
    checker = Checker(shown, lines)
    variant = Variant(**data["variant"]) if is_built_in(shown) and "variant" in data else None
    keys = {key: value for key, value in data.items() if variant is None or key != "variant"}
    good = checker.keys((), keys, schema.FILE_KEYS, "a policy file")
    extends = [(name, lines.line(("extends", at))) for at, name in enumerate(good.pop("extends", []))]
    tables = {name: _table(checker, name, good.pop(name)) for name in schema.TABLES if name in good}
    ids: dict[str, int] = {}
    rules = [check_rule(checker, ("rule", at), table, ids) for at, table in enumerate(good.pop("rule", []))]
    origins = {origin_key(name): checker.origin((name,)) for name in tables if name != "match"}
    tables[""] = good
    for name, table in tables.items():
        origins |= {origin_key(name, key): checker.origin((name, key) if name else (key,)) for key in table}
    valid = [rule for rule in rules if rule is not None]
    return PolicyFile(shown, extends, variant, tables, origins, valid, checker.mistakes)


def _table(checker: Checker, name: str, table: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a table that are accepted, in canonical form."""
    accepted = checker.keys((name,), table, schema.TABLES[name], f"[{name}]")
    good = checker.parsed((name,), accepted, schema.TABLES[name])
    bad = list(_MISTAKES[name](good))
    for key, message in bad:
        checker.mistake((name, key), message)
    return {key: value for key, value in good.items() if key not in dict(bad)}


#: Functions that check the values of a table together, and return keys with messages. [match] is checked after merging.
_MISTAKES: dict[str, Callable[[Mapping[str, Any]], Iterable[tuple[str, str]]]] = {
    "match": lambda table: (),
    "loss_scale": lambda table: mistakes(table, alone=True),
    "optimizer": optimizer_table.mistakes,
}
