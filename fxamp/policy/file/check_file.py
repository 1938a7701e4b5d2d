"""Checks one parsed policy file against the schema and collects every mistake with its line."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fxamp.policy.file import schema
from fxamp.policy.file.check_rule import Removal, check_rule
from fxamp.policy.file.checker import Checker
from fxamp.policy.file.lines import LineIndex
from fxamp.policy.file.paths import is_built_in
from fxamp.policy.model import optimizer_table
from fxamp.policy.model.comparisons import parse_version
from fxamp.policy.model.loss_scale import mistakes
from fxamp.policy.model.match import architecture, capability_condition, cpu_feature
from fxamp.policy.model.rule import Origin, Rule


@dataclass(frozen=True)
class Variant:
    """The table ``[variant]``, which shipped files alone have: the policies that it varies, and what it gives them."""

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
    tables = {name: check(checker, good.pop(name)) for name, check in _TABLES.items() if name in good}
    ids: dict[str, int] = {}
    rules = [check_rule(checker, ("rule", at), table, ids) for at, table in enumerate(good.pop("rule", []))]
    origins = {origin_key(name): checker.origin((name,)) for name in tables if name != "match"}
    tables[""] = good
    for name, table in tables.items():
        origins |= {origin_key(name, key): checker.origin((name, key) if name else (key,)) for key in table}
    valid = [rule for rule in rules if rule is not None]
    return PolicyFile(shown, extends, variant, tables, origins, valid, checker.mistakes)


def _match(checker: Checker, table: dict[str, Any]) -> dict[str, Any]:
    good = checker.keys(("match",), table, schema.TABLES["match"], "[match]")
    for key, parse in (("capability", capability_condition), ("torch", parse_version)):
        if key in good and checker.valid(("match", key), parse, good[key]) is None:
            del good[key]
    for key, parse_item in (("cpu_features", cpu_feature), ("arch", architecture)):
        if key in good:
            good[key] = checker.items(("match", key), parse_item, good[key])
    return good


def _settings(
    name: str, mistakes: Callable[[Mapping[str, Any]], Iterable[tuple[str, str]]]
) -> Callable[[Checker, dict[str, Any]], dict[str, Any]]:
    """Return the check of a table whose values ``mistakes`` judges, as pairs of a key and a message."""

    def check(checker: Checker, table: dict[str, Any]) -> dict[str, Any]:
        good = checker.keys((name,), table, schema.TABLES[name], f"[{name}]")
        bad = list(mistakes(good))
        for key, message in bad:
            checker.mistake((name, key), message)
        return {key: value for key, value in good.items() if key not in dict(bad)}

    return check


_TABLES = {
    "match": _match,
    "loss_scale": _settings("loss_scale", lambda table: mistakes(table, alone=True)),
    "optimizer": _settings("optimizer", optimizer_table.mistakes),
}
