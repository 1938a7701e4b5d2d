"""Find the rule of a policy that decides a call, which is the last one that covers it."""

from dataclasses import dataclass

from fxamp.policy.model.conditions import Mismatch
from fxamp.policy.model.op_names import glob_covers, is_glob, spellings
from fxamp.policy.model.rule import Rule, holds_in
from fxamp.policy.model.site import Site


@dataclass(frozen=True)
class Ruling:
    """The rule that decides a call, None if it follows its inputs.

    ``lost``: the other rules that cover the call, in their order. ``inapplicable``: the rules for the op with a
    condition that fails, each with the reason.
    """

    rule: Rule | None
    lost: tuple[Rule, ...] = ()
    inapplicable: tuple[tuple[Rule, Mismatch], ...] = ()

    @property
    def unknown(self) -> str:
        """A message about rules that do not apply because the compiler does not know a fact; "" if there are none."""
        return "; ".join(f"rule {rule.id} does not apply: {o.why}" for rule, o in self.inapplicable if o.unknown)


class RuleIndex:
    """The rules of a policy, indexed by op. The op alone decides whether a rule without further conditions applies."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._rules = rules
        self._exact: dict[str, list[int]] = {}
        self._globs: list[tuple[str, int]] = []
        self._every_op = [at for at, rule in enumerate(rules) if not rule.ops]
        for at, rule in enumerate(rules):
            for name in rule.ops:
                if is_glob(name):
                    self._globs.append((name, at))
                else:
                    self._exact.setdefault(name, []).append(at)
        self._candidates: dict[tuple[str, str], tuple[Rule, ...]] = {}
        self._plain: dict[tuple[str, str], Ruling | None] = {}

    def candidates(self, op: str, region: str) -> tuple[Rule, ...]:
        """Return the rules for an op in a region, in their order; their other conditions are not checked."""
        key = (op, region)
        if key not in self._candidates:
            positions = {at for name in spellings(op) for at in self._exact.get(name, ())}
            positions |= {at for pattern, at in self._globs if glob_covers(pattern, op)}
            rules = (self._rules[at] for at in sorted(positions.union(self._every_op)))
            self._candidates[key] = tuple(rule for rule in rules if holds_in(rule.region, region))
        return self._candidates[key]

    def plain(self, op: str, region: str) -> Ruling | None:
        """Return the ruling for an op if its name alone decides it, else None."""
        key = (op, region)
        if key not in self._plain:
            candidates = self.candidates(op, region)
            conditional = any(rule.conditional for rule in candidates)
            self._plain[key] = None if conditional else _last(list(candidates), ())
        return self._plain[key]

    def at(self, site: Site) -> Ruling:
        """Return the ruling for a call."""
        known = self.plain(site.op, site.region)
        if known is not None:
            return known
        checked = [(rule, rule.mismatch(site)) for rule in self.candidates(site.op, site.region)]
        covering = [rule for rule, mismatch in checked if mismatch is None]
        return _last(covering, tuple((rule, why) for rule, why in checked if why is not None))


def _last(covering: list[Rule], inapplicable: tuple[tuple[Rule, Mismatch], ...]) -> Ruling:
    if not covering:
        return Ruling(None, (), inapplicable)
    return Ruling(covering[-1], tuple(covering[:-1]), inapplicable)
