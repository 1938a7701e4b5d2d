"""Checks one parsed policy file against the schema, collecting every mistake with its line."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fxamp.errors import nearest
from fxamp.policy import schema
from fxamp.policy.category import Category
from fxamp.policy.lines import LineIndex, Path
from fxamp.policy.model import Origin, Rule, unknown_value
from fxamp.policy.names import canonical
from fxamp.policy.versions import parse_condition

_Result = TypeVar("_Result")


@dataclass
class PolicyFile:
    """What one file says by itself; ``fields`` are those of Policy, ``extends`` pairs a name with its line."""

    shown: str
    extends: list[tuple[str, int]] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def mistake(self, line: int, message: str) -> None:
        """Note a mistake as ``file:line: message``."""
        self.mistakes.append(f"{self.shown}:{line}: {message}")


def check_file(shown: str, data: dict[str, Any], lines: LineIndex) -> PolicyFile:
    """Return what a parsed file says, with every mistake in it; what is mistaken is left out."""
    return _Check(PolicyFile(shown), lines).file(data)


class _Check:
    def __init__(self, file: PolicyFile, lines: LineIndex) -> None:
        self.result = file
        self.lines = lines

    def file(self, data: dict[str, Any]) -> PolicyFile:
        good = self.keys((), data, schema.FILE_KEYS, "a policy file")
        match = self.keys(("match",), good.pop("match", {}), schema.MATCH_KEYS, "[match]")
        rules = good.pop("rule", [])
        extends = good.pop("extends", [])
        self.result.extends = [(name, self.lines.line(("extends", at))) for at, name in enumerate(extends)]
        self.result.fields = match | good
        ids: dict[str, int] = {}
        for at, table in enumerate(rules):
            self.rule(("rule", at), table, ids)
        return self.result

    def rule(self, path: Path, table: dict[str, Any], ids: dict[str, int]) -> None:
        before = len(self.result.mistakes)
        good = self.keys(path, table, schema.RULE_KEYS, "a [[rule]]")
        for key in schema.RULE_NEEDS:
            if key not in table:
                self.mistake(path, f"this [[rule]] has no {key}; a rule needs {', '.join(schema.RULE_NEEDS)}")
        self.unique_id(path, good, ids)
        good["ops"] = self.ops(path, good)
        self.valid((*path, "torch"), parse_condition, good.get("torch"))
        self.advice(path, table, good)
        if len(self.result.mistakes) > before:
            return
        origin = Origin(self.result.shown, self.lines.line(path))
        self.result.rules.append(Rule(**{**good, "cast": Category(good["cast"])}, origin=origin))

    def keys(self, path: Path, table: dict[str, Any], kinds: dict[str, str], where: str) -> dict[str, Any]:
        """Return the entries of ``table`` whose key and value are accepted; note the others."""
        return {key: value for key, value in table.items() if self.entry((*path, key), value, kinds, where)}

    def entry(self, path: Path, value: object, kinds: dict[str, str], where: str) -> bool:
        key = str(path[-1])
        if key not in kinds:
            message = f"unknown key {key!r} in {where}; accepted: {', '.join(kinds)}{nearest(key, kinds)}"
        elif not schema.is_of_kind(value, kinds[key]):
            message = f"{key} = {value!r} has the wrong type; accepted: {kinds[key]}"
        elif key in schema.CHOICES and value not in schema.CHOICES[key]:
            message = unknown_value(key, value, schema.CHOICES[key])
        else:
            return True
        self.mistake(path, message)
        return False

    def unique_id(self, path: Path, good: dict[str, Any], ids: dict[str, int]) -> None:
        name = good.get("id")
        if name is None:
            return
        if name in ids:
            self.mistake((*path, "id"), f"id = {name!r} is used twice; the first is on line {ids[name]}")
        elif not name:
            self.mistake((*path, "id"), "id = '' is empty; accepted: a word that names the rule")
        ids.setdefault(name, self.lines.line((*path, "id")))

    def ops(self, path: Path, good: dict[str, Any]) -> Iterable[str]:
        if good.get("ops") == []:
            self.mistake((*path, "ops"), "ops = [] is empty; accepted: a list of at least one op name")
        ops = enumerate(good.get("ops", []))
        names = [self.valid((*path, "ops", at), canonical, op) for at, op in ops]
        return tuple(name for name in names if name is not None)

    def advice(self, path: Path, table: dict[str, Any], good: dict[str, Any]) -> None:
        banned = good.get("cast") == Category.BANNED
        if banned and "advice" not in table:
            self.mistake(path, "this [[rule]] has cast = 'banned' but no advice; say what the user should do instead")
        if "advice" in table and "cast" in good and not banned:
            self.mistake((*path, "advice"), f"advice is for cast = 'banned', but this rule has cast = {good['cast']!r}")

    def valid(self, path: Path, parse: Callable[[str], _Result], text: str | None) -> _Result | None:
        """Return ``parse(text)``, or None after noting why it failed."""
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            self.mistake(path, str(error))
            return None

    def mistake(self, path: Path, message: str) -> None:
        self.result.mistake(self.lines.line(path), message)
