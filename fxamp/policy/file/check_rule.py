"""Checks one ``[[rule]]`` of a policy file."""

from dataclasses import dataclass
from typing import Any

from fxamp.policy.file import schema
from fxamp.policy.file.checker import Checker
from fxamp.policy.file.lines import Path
from fxamp.policy.model.category import Category
from fxamp.policy.model.rule import Rule, implied_region, needed_key, problems, problems_of_regions
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
    _needs(checker, path, table, enabled)
    _id(checker, path, good, ids)
    if good.get("args") == {}:
        checker.mistake((*path, "args"), "args is empty; accepted: argument names with conditions, such as dim = -1")
    parsed = checker.parsed(path, good, schema.RULE_KEYS)
    whole = {**good, "ops": parsed.get("ops", ())}
    _cast(checker, path, table, whole)
    for key, problem in problems_of_regions(whole):
        checker.mistake((*path, *key), problem)
    if len(checker.mistakes) > before:
        return None
    if not enabled:
        return Removal(good["id"], checker.lines.line(path), own=bool({"cast", "keep", "chunks", "drop"} & good.keys()))
    return Rule(**parsed, origin=checker.origin(path))


def _needs(checker: Checker, path: Path, table: dict[str, Any], enabled: bool) -> None:
    decision = needed_key(implied_region(table.get("region", "forward"), table.get("chunks"), table.get("drop")))
    for key in ("id", decision) if enabled else ("id",):
        if key not in table:
            message = f"this [[rule]] has no {key}; a rule needs id, {decision}, and a condition such as ops"
            checker.mistake(path, message)
    if enabled and not any(key in table for key in schema.CONDITIONS):
        conditions = ", ".join(schema.CONDITIONS)
        checker.mistake(path, f"this [[rule]] has no condition; a rule needs one at least of {conditions}")


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


def _cast(checker: Checker, path: Path, table: dict[str, Any], good: dict[str, Any]) -> None:
    cast = good.get("cast")
    if cast is None:
        return
    others = good.get("region", "forward"), good.get("inputs", {}), good.get("recipe", ""), good["ops"]
    for key, problem in problems(Category(cast), *others):
        if key[0] not in table or good.get(key[0]):  # else the value is not accepted, which is a mistake already
            checker.mistake((*path, *key), problem)
    banned = cast == Category.BANNED
    if banned and "advice" not in table:
        checker.mistake(path, "this [[rule]] has cast = 'banned' but no advice; say what the user should do instead")
    if "advice" in table and not banned:
        checker.mistake((*path, "advice"), f"advice is for cast = 'banned', but this rule has cast = {cast!r}")
