"""Checks one parsed policy file against the schema and collects every mistake with its line."""

from dataclasses import dataclass, field
from typing import Any

from fxamp.policy.file import schema
from fxamp.policy.file.check_rule import Removal, check_rule
from fxamp.policy.file.checker import Checker
from fxamp.policy.file.lines import LineIndex
from fxamp.policy.file.paths import is_built_in
from fxamp.policy.model import optimizer_precision
from fxamp.policy.model.loss_scale import mistakes
from fxamp.policy.model.match import architecture, capability_condition, cpu_feature
from fxamp.policy.model.rule import Origin, Rule
from fxamp.policy.model.versions import parse_condition


@dataclass(frozen=True)
class Variant:
    """The table ``[variant]``, which shipped files alone have: the policies that it varies, and what it gives them."""

    of: list[str]
    what: str


@dataclass
class PolicyFile:
    """The content of one file.

    ``extends`` pairs each name with its line. ``fields`` are those of Policy; ``loss_scale`` and ``optimizer`` are
    those tables. ``origins`` has the line of each key, under ``"loss_scale.KEY"`` for the keys of such a table.
    ``rules`` are in the file's order.
    """

    shown: str
    extends: list[tuple[str, int]] = field(default_factory=list)
    variant: Variant | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    loss_scale: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    origins: dict[str, Origin] = field(default_factory=dict)
    rules: list[Rule | Removal] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def mistake(self, line: int, message: str) -> None:
        """Record a mistake as ``file:line: message``."""
        self.mistakes.append(f"{self.shown}:{line}: {message}")


def check_file(shown: str, data: dict[str, Any], lines: LineIndex) -> PolicyFile:
    """Return the content of a parsed file with all mistakes; entries with a mistake are left out."""
    checker = Checker(shown, lines)
    variant = Variant(**data["variant"]) if is_built_in(shown) and "variant" in data else None
    keys = {key: value for key, value in data.items() if variant is None or key != "variant"}
    good = checker.keys((), keys, schema.FILE_KEYS, "a policy file")
    extends = [(name, lines.line(("extends", at))) for at, name in enumerate(good.pop("extends", []))]
    match = _match(checker, good.pop("match", {}))
    scale = _loss_scale(checker, good.pop("loss_scale")) if "loss_scale" in good else None
    optimizer = _optimizer(checker, good.pop("optimizer")) if "optimizer" in good else None
    ids: dict[str, int] = {}
    rules = [check_rule(checker, ("rule", at), table, ids) for at, table in enumerate(good.pop("rule", []))]
    origins = {key: checker.origin((key,)) for key in good} | {key: checker.origin(("match", key)) for key in match}
    origins |= {f"loss_scale.{key}": checker.origin(("loss_scale", key)) for key in scale or {}}
    origins |= {f"optimizer.{key}": checker.origin(("optimizer", key)) for key in optimizer or {}}
    if scale is not None:
        origins["loss_scale"] = checker.origin(("loss_scale",))
    said = [rule for rule in rules if rule is not None]
    return PolicyFile(shown, extends, variant, good | match, scale, optimizer, origins, said, checker.mistakes)


def _match(checker: Checker, table: dict[str, Any]) -> dict[str, Any]:
    good = checker.keys(("match",), table, schema.MATCH_KEYS, "[match]")
    for key, parse in (("capability", capability_condition), ("torch", parse_condition)):
        if key in good and checker.valid(("match", key), parse, good[key]) is None:
            del good[key]
    for key, parse_one in (("cpu_features", cpu_feature), ("arch", architecture)):
        if key in good:
            good[key] = checker.each(("match", key), parse_one, good[key])
    return good


def _loss_scale(checker: Checker, table: dict[str, Any]) -> dict[str, Any]:
    good = checker.keys(("loss_scale",), table, schema.LOSS_SCALE_KEYS, "[loss_scale]")
    found = mistakes(good, alone=True)
    for key, message in found:
        checker.mistake(("loss_scale", key), message)
    return {key: value for key, value in good.items() if key not in dict(found)}


def _optimizer(checker: Checker, table: dict[str, Any]) -> dict[str, Any]:
    good = checker.keys(("optimizer",), table, schema.OPTIMIZER_KEYS, "[optimizer]")
    found = list(optimizer_precision.mistakes(good))
    for key, message in found:
        checker.mistake(("optimizer", key), message)
    return {key: value for key, value in good.items() if key not in dict(found)}
