"""Text for the differences of policies, shared by all formats."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxamp.policy import Rule
from fxamp.policy.diff.op_changes import OpChange
from fxamp.policy.diff.rule_changes import LISTS, KeyChange, RuleChange
from fxamp.tools.common.formatting import plural
from fxamp.tools.diff.result import Comparison

SIGNS = {"added": "+", "removed": "-", "changed": "~", "renamed": "~", "moved": "~"}
"""The mark of each kind of change of a rule; ``!`` marks loss scaling."""

FOLLOWS = "follows its inputs"


def value(setting: object) -> str:
    """Return a value as written in a policy file, lists without brackets; "not set" for None."""
    if setting is None:
        return "not set"
    if isinstance(setting, bool):
        return str(setting).lower()
    if isinstance(setting, float):
        return f"{setting:.17g}"
    if isinstance(setting, (list, tuple)):
        return ", ".join(map(value, setting))
    if isinstance(setting, dict):
        return ", ".join(f"{key} = {_nested(item)}" for key, item in setting.items())
    return str(setting).removeprefix("aten::")


def _nested(setting: object) -> str:
    return f"{{ {value(setting)} }}" if isinstance(setting, dict) else value(setting)


def cast(rule: Rule | None) -> str:
    """Return what ``rule`` does to the inputs of an op."""
    if rule is None:
        return FOLLOWS
    inputs = rule.content().get("inputs")
    return f"{rule.asks} ({value(inputs)})" if inputs else rule.asks


def rule_text(change: RuleChange) -> str:
    """Return what has changed in a rule, without its id."""
    old, new = change.old, change.new
    if change.kind == "renamed" and old is not None:
        return f"renamed from {old.id}"
    if change.kind == "moved" and change.passed is not None:
        return f"comes after {change.passed.id} now, and overrides it"
    if change.kind == "changed":
        return "; ".join(map(_key, change.keys))
    rule = old or new
    assert rule is not None
    keys = {key: item for key, item in rule.content().items() if key not in ("id", rule.main_key, "ops", "advice")}
    more = "".join(f"; {key}: {value(item)}" for key, item in keys.items())
    return f"{rule.asks}: {value(rule.ops) if rule.ops else 'any op'}{more}"


def written_at(change: RuleChange) -> str:
    """Return the location of the rule; both locations if it is in both policies at different places."""
    places = [str(rule.origin) for rule in (change.old, change.new) if rule is not None and rule.origin is not None]
    return " -> ".join(dict.fromkeys(places))


def _key(change: KeyChange) -> str:
    if change.key not in LISTS:
        return f"{change.key}: {value(change.old)} -> {value(change.new)}"
    sides = (("-", change.old), ("+", change.new))
    marked = (f"{sign}{value(item)}" for sign, items in sides if isinstance(items, list) for item in items)
    return f"{change.key}: {' '.join(marked)}"


@dataclass(frozen=True)
class Group:
    """Decisions that change in the same way: from which cast to which, in which situation; with the ops, by rule.

    If one side has a rule without op names, the heading holds only that side's cast; ``lines`` are then the casts of
    the other side with the overridden rules, instead of all their ops.
    """

    heading: str
    lines: tuple[tuple[str, tuple[str, ...]], ...]


def groups(changes: Iterable[OpChange]) -> list[Group]:
    """Group changes of decisions, in order of first occurrence."""
    grouped: dict[str, dict[str, dict[str, None]]] = {}
    for change in changes:
        heading, label, item = _broad(change) or _narrow(change)
        where = ", ".join([*_REGION_WORDS.get(change.region, ()), *change.when])
        lines = grouped.setdefault(f"{heading}{', ' if where else ''}{where}", {})
        lines.setdefault(label, {})[item] = None
    return [
        Group(heading, tuple((label, tuple(items)) for label, items in by.items())) for heading, by in grouped.items()
    ]


_REGION_WORDS = {"backward": ("in the backward",), "kept": ("kept for the backward",)}


def _narrow(change: OpChange) -> tuple[str, str, str]:
    ids = [rule_id(change.old), rule_id(change.new)]
    rules = ids[0] if ids[0] == ids[1] else " -> ".join(ids)
    one, other = cast(change.old), cast(change.new)
    if one == other and change.old is not None and change.new is not None:
        before, after = change.old.settings, change.new.settings
        keys = [key for key, setting in before.items() if setting != after[key]]
        one, other = (
            f"{one} ({', '.join(f'{key} = {value(side[key] or None)}' for key in keys)})" for side in (before, after)
        )
    return f"{one} -> {other}", rules, change.op


def _broad(change: OpChange) -> tuple[str, str, str] | None:
    """Return the group of a change by a rule without op names; None if there is none, or one on both sides."""
    old, new = (rule is not None and not rule.ops for rule in (change.old, change.new))
    if old == new:
        return None
    if new:
        return f"any op -> {cast(change.new)} by {rule_id(change.new)}", f"was {cast(change.old)}", _named(change.old)
    return f"any op by {rule_id(change.old)}, {cast(change.old)} ->", f"now {cast(change.new)}", _named(change.new)


def rule_id(rule: Rule | None) -> str:
    """Return the rule's id."""
    return "no rule" if rule is None else rule.id


def _named(rule: Rule | None) -> str:
    return "ops without a rule" if rule is None else rule.id


def ops_counted(changes: Sequence[OpChange]) -> int:
    """Return how many ops are decided differently; an op in several situations counts once."""
    return len({change.op for change in changes})


def summary(comparison: Comparison) -> str:
    """Return the last line: whether the policies decide the same."""
    if comparison.same:
        rest = f"; {plural(len(comparison.diff.rules), 'rule')} written differently" if comparison.diff.rules else ""
        return f"the same: nothing is decided differently{rest}"
    counts = [
        (len(comparison.settings), "setting"),
        (len(comparison.loss_scale), "loss-scaling setting"),
        (len(comparison.diff.rules), "rule"),
    ]
    parts = [plural(count, one) for count, one in counts if count]
    ops = ops_counted(comparison.diff.ops)
    parts += [f"{plural(ops, 'op')} decided differently"] if ops else []
    return f"they differ: {', '.join(parts)}"
