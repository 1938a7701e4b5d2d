"""Find the ops that two policies decide differently, and the conditions under which they do.

In a policy the last rule that covers a call decides. So two policies differ on an op exactly if some call is decided by
one rule in the first policy, and in the second policy by a rule with another cast. The rules' conditions show whether
such a call can exist (:mod:`fxamp.policy.diff.rule_overlap`): the order of two rules matters only if one call can meet
the conditions of both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from fxamp.policy.diff.op_patterns import OpPattern, op_patterns
from fxamp.policy.diff.rule_overlap import exclusive, implied
from fxamp.policy.model.rule import Rule
from fxamp.policy.model.site import REGIONS
from fxamp.policy.policy import Policy


@dataclass(frozen=True)
class OpChange:
    """Ops that the two policies decide differently.

    ``op``: in the spelling of policies. ``region``: one of :data:`REGIONS`. ``when``: further conditions on
    the call, in words. ``old`` and ``new``: the deciding rules, None if the op follows its inputs.
    """

    op: str
    region: str
    when: tuple[str, ...]
    old: Rule | None
    new: Rule | None


def op_changes(old: Policy, new: Policy) -> tuple[OpChange, ...]:
    """Return the ops that two resolved policies decide differently, in the order in which the rules name them."""
    before, after = _all_rules(old), _all_rules(new)
    changes = (
        OpChange(pattern.text, region, situation(one, other), one, other)
        for region in REGIONS
        for pattern in op_patterns([*before, *after])
        for one, other in _disagreements(_deciding(before, pattern, region), _deciding(after, pattern, region))
    )
    return tuple(dict.fromkeys(changes))


def _all_rules(policy: Policy) -> list[Rule]:
    """Return the policy's rules, with ``unlisted`` as the first rule."""
    return [*([] if policy.default_rule is None else [policy.default_rule]), *policy.rules]


def _deciding(rules: Sequence[Rule], pattern: OpPattern, region: str) -> list[Rule | None]:
    """Return the rules for the ops, first to last; None stands for ops that follow their inputs."""
    return [None, *(rule for rule in rules if rule.covers_op(pattern.op, region))]


def _disagreements(old: Sequence[Rule | None], new: Sequence[Rule | None]) -> Iterator[tuple[Rule | None, Rule | None]]:
    """Yield the pairs of rules, one from each list, that can decide the same call and have different casts."""
    for at, one in enumerate(old):
        for place, other in enumerate(new):
            if _asks(one) != _asks(other) and _conceivable(one, other, [*old[at + 1 :], *new[place + 1 :]]):
                yield one, other


def _asks(rule: Rule | None) -> object:
    return None if rule is None else rule.settings


def _conceivable(one: Rule | None, other: Rule | None, later: Sequence[Rule | None]) -> bool:
    """Return whether a call can meet both rules and none of the ``later`` ones, which would win."""
    both = [rule for rule in (one, other) if rule is not None]
    if len(both) == 2 and exclusive(both[0], both[1]):
        return False
    overriding = [rule for rule in later if rule is not None]
    return any(not any(implied(rule, case) for rule in overriding) for case in product(*map(_cases, both)))


def _cases(rule: Rule) -> list[Rule]:
    """Split the rule into one for each of its modules and module classes; a call meets the rule if it meets one."""
    if max(len(rule.modules), len(rule.module_classes)) < 2:
        return [rule]
    modules, classes = map(_one_by_one, (rule.modules, rule.module_classes))
    return [replace(rule, modules=one, module_classes=other) for one, other in product(modules, classes)]


def _one_by_one(globs: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [(glob,) for glob in globs] if globs else [()]


def situation(*rules: Rule | None) -> tuple[str, ...]:
    """Return the conditions of ``rules`` other than op and region, in words."""
    conditions = (one for rule in rules if rule is not None for one in rule.conditions())
    return tuple(dict.fromkeys(words for _, condition, value in conditions for words in condition.words(value)))
