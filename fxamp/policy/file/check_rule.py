"""Checks one ``[[rule]]`` of a policy file."""

from dataclasses import dataclass
from typing import Any

from fxamp.policy.file import schema
from fxamp.policy.file.checker import Checker
from fxamp.policy.file.lines import Path
from fxamp.policy.model.category import Category
from fxamp.policy.model.chunks import chunk_problems, chunks_of
from fxamp.policy.model.comparisons import parse_version, size_condition
from fxamp.policy.model.conditions import ArgCondition
from fxamp.policy.model.keep import keep_problems
from fxamp.policy.model.module_globs import module_glob
from fxamp.policy.model.op_names import canonical
from fxamp.policy.model.rule import Rule, implied_region, needed_key, problems
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
    parsed = {**good, **_conditions(checker, path, good)}
    checker.valid((*path, "torch"), parse_version, good.get("torch"))
    _cast(checker, path, table, {**good, "ops": parsed["ops"]})
    checker.valid((*path, "chunks"), chunks_of, good.get("chunks"))
    whole = {**good, "ops": parsed["ops"]}
    for key, problem in (*keep_problems(whole), *chunk_problems(whole)):
        checker.mistake((*path, *key), problem)
    if len(checker.mistakes) > before:
        return None
    if not enabled:
        return Removal(good["id"], checker.lines.line(path), own=bool({"cast", "keep", "chunks"} & good.keys()))
    return Rule(**parsed, origin=checker.origin(path))


def _needs(checker: Checker, path: Path, table: dict[str, Any], enabled: bool) -> None:
    decision = needed_key(implied_region(table.get("region", "forward"), table.get("chunks")))
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


def _conditions(checker: Checker, path: Path, good: dict[str, Any]) -> dict[str, Any]:
    if good.get("args") == {}:
        checker.mistake((*path, "args"), "args is empty; accepted: argument names with conditions, such as dim = -1")
    conditions = {
        name: checker.valid((*path, "args", name), ArgCondition.of, value)
        for name, value in good.get("args", {}).items()
    }
    sizes = {key: checker.valid((*path, key), size_condition, good.get(key)) or "" for key in ("reduces", "elements")}
    return {
        "ops": checker.items((*path, "ops"), canonical, good.get("ops")),
        "modules": checker.items((*path, "modules"), module_glob, good.get("modules")),
        "module_classes": checker.items((*path, "module_classes"), _class_glob, good.get("module_classes")),
        "args": conditions,
        "read_by": checker.items((*path, "read_by"), canonical, good.get("read_by")),
        **sizes,
    }


def _class_glob(text: str) -> str:
    if not text.strip() or " " in text:
        raise ValueError(f"{text!r} is not a class name; accepted: a name or glob such as 'LayerNorm' or '*RMSNorm'")
    return text


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
