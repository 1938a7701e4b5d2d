"""The differences between the rules as two policies write them: added, removed, renamed or changed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxamp.policy.file.schema import RULE_KEYS
from fxamp.policy.model.keys import STRINGS
from fxamp.policy.model.rule import Rule

LISTS = tuple(name for name, key in RULE_KEYS.items() if key.kind is STRINGS)
"""The keys of a rule whose value is a list without a meaningful order."""


@dataclass(frozen=True)
class KeyChange:
    """A setting or a key of a rule with both values, None if not set; for lists, the items that only one side has."""

    key: str
    old: object
    new: object


@dataclass(frozen=True)
class RuleChange:
    """One rule that differs between the policies.

    ``kind``: "added", "removed", "changed" (see ``keys``), "renamed", or "moved": the same rule at another position,
    which changes what is decided; ``passed`` is the rule that it now overrides.
    """

    kind: str
    old: Rule | None
    new: Rule | None
    keys: tuple[KeyChange, ...] = ()
    passed: Rule | None = None

    @property
    def id(self) -> str:
        """The rule's id, the new one if it was renamed."""
        rule = self.new or self.old
        return "" if rule is None else rule.id


def rule_changes(old: Sequence[Rule], new: Sequence[Rule]) -> tuple[RuleChange, ...]:
    """Return the differences in the order of the old rules, then of the new; order, why and origin do not count."""
    before, after = {rule.id: rule for rule in old}, {rule.id: rule for rule in new}
    renamed = _renamed([r for r in old if r.id not in after], [r for r in new if r.id not in before])
    changes = [change for rule in old if (change := _change(rule, after.get(rule.id), renamed)) is not None]
    taken = {rule.id for rule in renamed.values()}
    return (*changes, *(RuleChange("added", None, r) for r in new if r.id not in before and r.id not in taken))


def _change(old: Rule, new: Rule | None, renamed: Mapping[str, Rule]) -> RuleChange | None:
    if old.id in renamed:
        return RuleChange("renamed", old, renamed[old.id])
    if new is None:
        return RuleChange("removed", old, None)
    keys = tuple(_keys(old, new))
    return RuleChange("changed", old, new, keys) if keys else None


def _renamed(removed: Sequence[Rule], added: Sequence[Rule]) -> dict[str, Rule]:
    """Return, by the id of each removed rule, the added rule with the same content under another id."""
    pairs: dict[str, Rule] = {}
    left = list(added)
    for rule in removed:
        match = next((other for other in left if not any(_keys(rule, other))), None)
        if match is not None:
            pairs[rule.id] = match
            left.remove(match)
    return pairs


def _keys(old: Rule, new: Rule) -> Iterator[KeyChange]:
    before, after = old.content(), new.content()
    for key in dict.fromkeys([*before, *after]):
        one, other = before.get(key), after.get(key)
        if key == "id":
            continue
        if key in LISTS:
            one, other = (one or []), (other or [])
            assert isinstance(one, list)
            assert isinstance(other, list)
            one, other = [item for item in one if item not in other], [item for item in other if item not in one]
            one, other = one or None, other or None
        if one != other:
            yield KeyChange(key, one, other)
