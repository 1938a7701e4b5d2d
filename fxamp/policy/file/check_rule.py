"""Check one ``[[rule]]`` of a policy file."""

from dataclasses import dataclass
from typing import Any

from fxamp.policy.file import schema
from fxamp.policy.file.checker import Checker
from fxamp.policy.file.lines import Path
from fxamp.policy.model.rule import Rule, kind_of, mistakes
from fxamp.policy.model.settings import UNLISTED_ID


@dataclass(frozen=True)
class Removal:
    """``enabled = false``: the inherited rule of this id is removed.

    ``own``: the table holds a whole rule, so no inherited rule needs to exist.
    """

    id: str
    line: int
    own: bool


def check_rule(checker: Checker, path: Path, table: dict[str, Any], ids: dict[str, int]) -> Rule | Removal | None:
    """Return the rule, or None if it has a mistake; ``ids`` has the lines of the ids seen so far."""
    before = len(checker.mistakes)
    good = checker.keys(path, table, schema.RULE_KEYS, "a [[rule]]")
    enabled = good.pop("enabled", True)
    kind = kind_of(table)
    _needs(checker, path, table, enabled, kind.main_key)
    _id(checker, path, good, ids)
    if good.get("args") == {}:
        checker.mistake((*path, "args"), "args is empty; accepted: argument names with conditions, such as dim = -1")
    parsed = checker.parsed(path, good, schema.RULE_KEYS)
    for key, mistake in mistakes(kind, parsed):
        if not key or key[0] in parsed or key[0] not in table:  # otherwise its value has been reported already
            checker.mistake((*path, *key), mistake)
    if len(checker.mistakes) > before:
        return None
    if not enabled:
        return Removal(good["id"], checker.lines.line(path), own=kind.main_key in good)
    return kind(**parsed, origin=checker.origin(path))


def _needs(checker: Checker, path: Path, table: dict[str, Any], enabled: bool, main_key: str) -> None:
    for key in ("id", main_key) if enabled else ("id",):
        if key not in table:
            message = f"this [[rule]] has no {key}; a rule needs id, {main_key}, and a condition such as ops"
            checker.mistake(path, message)
    if enabled and not any(key in table for key in schema.CONDITIONS):
        conditions = ", ".join(schema.CONDITIONS)
        checker.mistake(path, f"this [[rule]] has no condition; a rule needs at least one of {conditions}")


def _id(checker: Checker, path: Path, good: dict[str, Any], ids: dict[str, int]) -> None:
    name = good.get("id")
    if name is None:
        return
    if name in ids:
        checker.mistake((*path, "id"), f"id = {name!r} is used twice; the first is on line {ids[name]}")
    elif not name.strip():
        checker.mistake((*path, "id"), f"id = {name!r} is empty; accepted: a word that names the rule")
    elif name == UNLISTED_ID:
        checker.mistake((*path, "id"), f"id = {name!r} is what reports call the key unlisted; accepted: another word")
    ids.setdefault(name, checker.lines.line((*path, "id")))
