"""What two resolved policies say and decide differently: a difference of meaning, not of text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from fxamp.policy.diff.op_changes import OpChange, op_changes
from fxamp.policy.diff.rule_changes import RuleChange, rule_changes
from fxamp.policy.model.comparisons import parse
from fxamp.policy.model.loss_scale import LossScale
from fxamp.policy.model.settings import UNLISTED_ID
from fxamp.policy.policy import Policy

SETTINGS = ("device", "capability", "cpu_features", "torch", "lower_precision_fp", "unlisted", "outputs")
"""The settings of a policy that are compared, beside loss scaling."""


@dataclass(frozen=True)
class SettingChange:
    """A setting with its two values, None where it is not set."""

    key: str
    old: object
    new: object


@dataclass(frozen=True)
class PolicyDiff:
    """All differences. ``rules`` are those in what is written, ``ops`` those in what is decided.

    ``loss_scale`` has the settings of that table that differ; where a policy lacks it, losses are scaled with the
    defaults for float16, and not at all for bfloat16.
    """

    old: Policy
    new: Policy
    settings: tuple[SettingChange, ...]
    loss_scale: tuple[SettingChange, ...]
    rules: tuple[RuleChange, ...]
    ops: tuple[OpChange, ...]

    @cached_property
    def same(self) -> bool:
        """Whether both decide the same; their rules may be written differently then."""
        return not (self.settings or self.loss_scale or self.ops)


def diff_policies(old: Policy, new: Policy) -> PolicyDiff:
    """Compare two policies, which are resolved (:meth:`Policy.resolve`).

    Names, files, comments, ``why``, the order of rules that cannot meet, and the ids of rules do not make a difference
    in what is decided.
    """
    ops = op_changes(old, new)
    rules = rule_changes(old.rules, new.rules)
    rewritten = {UNLISTED_ID} | {rule.id for change in rules for rule in (change.old, change.new) if rule is not None}
    moved = _moved(ops, rewritten)
    return PolicyDiff(old, new, tuple(_settings(old, new)), tuple(_loss_scale(old, new)), (*rules, *moved), ops)


def _moved(ops: Sequence[OpChange], rewritten: set[str]) -> Iterator[RuleChange]:
    """The rules that are written alike but decide where another one did: the order of the two has changed."""
    seen = set()
    for change in ops:
        before, after = change.old, change.new
        if before is None or after is None or {before.id, after.id} & rewritten:
            continue
        if (before.id, after.id) not in seen:
            seen.add((before.id, after.id))
            yield RuleChange("moved", after, after, passed=before)


def _settings(old: Policy, new: Policy) -> Iterator[SettingChange]:
    for key in SETTINGS:
        before, after = getattr(old, key), getattr(new, key)
        if _meaning(key, before) != _meaning(key, after):
            yield SettingChange(key, before or None, after or None)


def _meaning(key: str, value: str | Sequence[str]) -> object:
    """A setting's value without what does not count in it: spaces, and the order of conditions."""
    if key in ("capability", "torch") and isinstance(value, str):
        return frozenset(parse(value, key, key)) if value else None
    return frozenset(value) if key == "cpu_features" else value


def _loss_scale(old: Policy, new: Policy) -> Iterator[SettingChange]:
    before, after = _scaling(old), _scaling(new)
    if not (before.enabled or after.enabled):
        return
    for field in fields(LossScale):
        one, other = getattr(before, field.name), getattr(after, field.name)
        if one != other:
            yield SettingChange(field.name, one, other)


def _scaling(policy: Policy) -> LossScale:
    """How losses are scaled: where the policy does not say, float16 alone needs it."""
    return policy.loss_scale or LossScale(enabled=policy.lower_precision_fp == "float16")
