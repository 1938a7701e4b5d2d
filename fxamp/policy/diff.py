"""What two resolved policies decide differently: a difference of meaning, not of text.

Policies are compared decision by decision. In each, the last rule that covers a call decides; so two of them differ on
an op exactly if a call is conceivable which a rule of the one decides, another rule of the other decides, and both ask
for different casts. Whether it is conceivable is judged from the rules' conditions (:mod:`fxamp.policy.overlap`), so
that the order of rules counts only where they can meet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from fxamp.policy.comparisons import parse
from fxamp.policy.diff_rules import RuleChange, rule_changes
from fxamp.policy.loss_scale import LossScale
from fxamp.policy.model import Policy
from fxamp.policy.op_patterns import OpPattern, op_patterns
from fxamp.policy.overlap import exclusive, implied
from fxamp.policy.rule import Rule
from fxamp.policy.site import REGIONS

SETTINGS = ("device", "capability", "cpu_features", "torch", "lower_precision_fp", "unlisted", "outputs", "placement")


@dataclass(frozen=True)
class SettingChange:
    """A setting with its two values; None where it is not set. ``key`` is ``"loss_scale.KEY"`` for loss scaling."""

    key: str
    old: object
    new: object


@dataclass(frozen=True)
class OpChange:
    """Ops that are decided differently.

    ``op``: as policies write it. ``region``: "forward" or "backward". ``when``: what must hold of the call besides, in
    words. ``old`` and ``new``: the rules that decide then, None where the op follows its inputs.
    """

    op: str
    region: str
    when: tuple[str, ...]
    old: Rule | None
    new: Rule | None


@dataclass(frozen=True)
class PolicyDiff:
    """All differences of two policies; ``rules`` are those in what is written, ``ops`` those in what is decided."""

    old: Policy
    new: Policy
    settings: tuple[SettingChange, ...]
    loss_scale: tuple[SettingChange, ...]
    rules: tuple[RuleChange, ...]
    ops: tuple[OpChange, ...]

    @cached_property
    def same(self) -> bool:
        """Whether both decide the same; rules may be written differently then."""
        return not (self.settings or self.loss_scale or self.ops)


def diff_policies(old: Policy, new: Policy) -> PolicyDiff:
    """Compare two policies, which are resolved (:meth:`Policy.resolve`)."""
    ops = tuple(_op_changes(old, new))
    return PolicyDiff(
        old, new, tuple(_settings(old, new)), tuple(_loss_scale(old, new)), rule_changes(old.rules, new.rules), ops
    )


def _settings(old: Policy, new: Policy) -> Iterator[SettingChange]:
    for key in SETTINGS:
        before, after = getattr(old, key), getattr(new, key)
        if _meaning(key, before) != _meaning(key, after):
            yield SettingChange(key, before or None, after or None)


def _meaning(key: str, value: "str | tuple[str, ...]") -> object:
    """The value of a setting without what does not count in it: spaces and the order of conditions."""
    if key == "cpu_features":
        return frozenset(value)
    if key in ("capability", "torch") and isinstance(value, str) and value:
        return frozenset(parse(value, key, ""))
    return value


def _loss_scale(old: Policy, new: Policy) -> Iterator[SettingChange]:
    before, after = _scaling(old), _scaling(new)
    if not (before.enabled or after.enabled):
        return
    for each in fields(LossScale):
        one, other = getattr(before, each.name), getattr(after, each.name)
        if one != other:
            yield SettingChange(f"loss_scale.{each.name}", one, other)


def _scaling(policy: Policy) -> LossScale:
    """How losses are scaled: float16 alone needs it where the policy does not say."""
    return policy.loss_scale or LossScale(enabled=policy.lower_precision_fp == "float16")


def _op_changes(old: Policy, new: Policy) -> Iterator[OpChange]:
    patterns = op_patterns([*_forward_rules(old), *_forward_rules(new)])
    for region in REGIONS:
        for pattern in patterns:
            found = (
                OpChange(pattern.text, region, situation((one, other)), one, other)
                for one, other in _disagreements(_rules_for(old, pattern, region), _rules_for(new, pattern, region))
            )
            yield from dict.fromkeys(found)


def _forward_rules(policy: Policy) -> list[Rule]:
    """All rules, after the one that ``unlisted`` stands for."""
    return [*([] if policy.default_rule is None else [policy.default_rule]), *policy.rules]


def _rules_for(policy: Policy, pattern: OpPattern, region: str) -> list[Rule | None]:
    """The rules that can decide the ops, first to last; None, which is to follow the inputs, is there if no rule is."""
    found: list[Rule | None] = [None]
    for rule in _forward_rules(policy):
        if rule.covers_op(pattern.op, region):
            found = [rule] if _unconditional(rule, pattern) else [*found, rule]
    return found


def _unconditional(rule: Rule, pattern: OpPattern) -> bool:
    return not rule.conditional


def _disagreements(old: "list[Rule | None]", new: "list[Rule | None]") -> Iterator[tuple[Rule | None, Rule | None]]:
    """The pairs of rules, one of each list, that can decide the same call but ask for different casts."""
    for at, one in enumerate(old):
        for place, other in enumerate(new):
            if _action(one) != _action(other) and _conceivable(one, other, [*old[at + 1 :], *new[place + 1 :]]):
                yield one, other


def _action(rule: Rule | None) -> object:
    return None if rule is None else (rule.cast, rule.inputs, rule.advice)


def _conceivable(one: Rule | None, other: Rule | None, later: "Sequence[Rule | None]") -> bool:
    """Whether a call can meet both rules and none of those that come ``later``."""
    both = [rule for rule in (one, other) if rule is not None]
    if len(both) == 2 and exclusive(*both):
        return False
    return not any(rule is not None and implied(rule, both) for rule in later)
