"""The differences in meaning, not in text, between two resolved policies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from fxamp.dtypes import SCALED_DTYPES
from fxamp.policy.diff.op_changes import OpChange, op_changes
from fxamp.policy.diff.rule_changes import KeyChange, RuleChange, rule_changes
from fxamp.policy.file.schema import TABLES
from fxamp.policy.model.comparisons import parse
from fxamp.policy.model.loss_scale import LossScale
from fxamp.policy.model.optimizer_table import OptimizerPrecision
from fxamp.policy.model.settings import UNLISTED_ID
from fxamp.policy.policy import Policy

SETTINGS = (*TABLES["match"], "lower_precision_fp", "unlisted", "outputs")
"""The settings that are compared, besides loss scaling."""


@dataclass(frozen=True)
class PolicyDiff:
    """All differences. ``rules``: differences in the text of rules. ``ops``: differences in what the rules decide.

    ``loss_scale`` has the settings of that table that differ. A policy without the table scales losses with the
    defaults if it is for float16, and not at all if it is for bfloat16.
    """

    old: Policy
    new: Policy
    settings: tuple[KeyChange, ...]
    loss_scale: tuple[KeyChange, ...]
    rules: tuple[RuleChange, ...]
    ops: tuple[OpChange, ...]

    @cached_property
    def same(self) -> bool:
        """Whether both policies decide the same, even if their rules are written differently."""
        return not (self.settings or self.loss_scale or self.ops)


def diff_policies(old: Policy, new: Policy) -> PolicyDiff:
    """Compare two resolved policies (see :meth:`Policy.resolve`).

    Names, files, comments, ``why``, the ids of rules, and the order of rules that never cover the same call do not
    count.
    """
    ops = op_changes(old, new)
    rules = rule_changes(old.rules, new.rules)
    rewritten = {UNLISTED_ID} | {rule.id for change in rules for rule in (change.old, change.new) if rule is not None}
    moved = _moved(ops, rewritten)
    return PolicyDiff(
        old, new, (*_settings(old, new), *_optimizer(old, new)), tuple(_loss_scale(old, new)), (*rules, *moved), ops
    )


def _moved(ops: Sequence[OpChange], rewritten: set[str]) -> Iterator[RuleChange]:
    """Yield the unchanged rules that now win over another unchanged one: the order of the two has changed."""
    pairs = set()
    for change in ops:
        before, after = change.old, change.new
        if before is None or after is None or {before.id, after.id} & rewritten:
            continue
        if (before.id, after.id) not in pairs:
            pairs.add((before.id, after.id))
            yield RuleChange("moved", after, after, passed=before)


def _settings(old: Policy, new: Policy) -> Iterator[KeyChange]:
    for key in SETTINGS:
        before, after = getattr(old, key), getattr(new, key)
        if _meaning(key, before) != _meaning(key, after):
            yield KeyChange(key, before or None, after or None)


def _optimizer(old: Policy, new: Policy) -> Iterator[KeyChange]:
    """Yield the keys of ``[optimizer]`` that differ; without the table, the state stays as the optimizer creates it."""
    before, after = (policy.optimizer or OptimizerPrecision() for policy in (old, new))
    for key in TABLES["optimizer"]:
        one, other = before.content().get(key), after.content().get(key)
        if one != other:
            yield KeyChange(f"optimizer.{key}", one, other)


def _meaning(key: str, value: str | Sequence[str]) -> object:
    """Return a setting's value without what does not count: spaces, and the order of its conditions."""
    if key in ("capability", "torch") and isinstance(value, str):
        return frozenset(parse(value, key, key)) if value else None
    return frozenset(value) if key in ("arch", "cpu_features") else value


def _loss_scale(old: Policy, new: Policy) -> Iterator[KeyChange]:
    before, after = _scaling(old), _scaling(new)
    if not (before.enabled or after.enabled):
        return
    for field in fields(LossScale):
        one, other = getattr(before, field.name), getattr(after, field.name)
        if one != other:
            yield KeyChange(field.name, one, other)


def _scaling(policy: Policy) -> LossScale:
    """Return the loss scaling of a policy; by default only float16 has one."""
    return policy.loss_scale or LossScale(enabled=policy.lower_precision_fp in SCALED_DTYPES)
