"""``--format json``: the whole comparison, one record per op."""

import json
from typing import Any

from fxamp.policy import Rule
from fxamp.policy.diff.op_changes import OpChange
from fxamp.policy.diff.rule_changes import KeyChange, RuleChange
from fxamp.tools.diff.result import Comparison
from fxamp.tools.diff.sides import Side
from fxamp.tools.diff.words import SIGNS

#: Increased when a reader of the previous version would misread the data.
FORMAT = 1


def to_json(comparison: Comparison) -> str:
    """Return the comparison as JSON; null means not set, or for an op that it follows its inputs."""
    written: dict[str, Any] = {
        "format": FORMAT,
        "same": comparison.same,
        "old": _side(comparison.old),
        "new": _side(comparison.new),
        "settings": list(map(_key, comparison.settings)),
        "loss_scale": list(map(_key, comparison.loss_scale)),
        "rules": [_rule_change(change) for change in comparison.diff.rules],
        "ops": [_op(change) for change in comparison.diff.ops],
        "graphs": [effect.content() for effect in comparison.effects],
        "runs": [run.content() for run in comparison.runs],
    }
    if comparison.costs:
        written["costs"] = [cost.content() for cost in comparison.costs]
    return json.dumps(written, indent=1, ensure_ascii=False) + "\n"


def _side(side: Side) -> dict[str, Any]:
    settings = {key: getattr(side.policy, key) for key in ("device", "lower_precision_fp") if key not in side.open}
    return {"name": side.policy.name, "given": side.source, **settings}


def _key(change: KeyChange) -> dict[str, Any]:
    return {"key": change.key, "old": change.old, "new": change.new}


def _rule_change(change: RuleChange) -> dict[str, Any]:
    written: dict[str, Any] = {"mark": SIGNS[change.kind], "kind": change.kind, "id": change.id}
    for key, rule in (("old", change.old), ("new", change.new)):
        written[key] = None if rule is None else {**rule.content(), "at": str(rule.origin or "")}
    written["keys"] = list(map(_key, change.keys))
    return written | ({"passed": change.passed.id} if change.passed is not None else {})


def _op(change: OpChange) -> dict[str, Any]:
    decided = {key: _decided(rule) for key, rule in (("old", change.old), ("new", change.new))}
    return {"op": change.op, "region": change.region, "when": list(change.when), **decided}


def _decided(rule: Rule | None) -> dict[str, Any] | None:
    if rule is None:
        return None
    inputs = rule.content().get("inputs")
    return {"rule": rule.id, rule.main_key: rule.asks, **({"inputs": inputs} if inputs else {})}
