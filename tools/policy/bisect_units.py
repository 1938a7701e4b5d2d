"""The units that bisecting widens: subtrees of modules, a module's own calls, rules of the policy.

Under a policy with rules for fp8 a unit changes from fp8 to 16 bits, under any other from 16 bits to float32. In the
region "kept" the values that a unit makes are kept for the backward as the forward made them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fxamp.listing import KeptValue
from fxamp.policy import Category, Policy, Rule
from fxamp.policy.model.keep import KEPT, Keep
from fxamp.policy.model.rule import PRODUCTS
from fxamp.tools.policy.calibrate_rules import exact, short
from fxamp.tools.policy.places import ModuleOp


@dataclass(frozen=True)
class Widening:
    """How a unit is widened: its rules get this ``cast``, for these ``ops``, or all if empty; ``words`` describe it.

    Without a cast its rules are of region "kept", and keep values as they are.
    """

    cast: Category | None
    ops: tuple[str, ...]
    words: str

    def rule(self, name: str, region: str, ops: tuple[str, ...], modules: tuple[str, ...]) -> Rule:
        """Return the rule called ``name`` that widens ``ops`` in ``modules``; ``region`` is for rules with a cast."""
        if self.cast is None:
            return Rule(name, keep=Keep.AS_IS, ops=ops, modules=modules, region=KEPT)
        return Rule(name, self.cast, ops, modules=modules, region=region)

    def whole(self, base: Rule) -> Rule:
        """Return ``base`` widened, under its own id."""
        if self.cast is None:
            return replace(base, keep=Keep.AS_IS, block=0, origin=None)
        return replace(base, cast=self.cast, recipe="", inputs=(), origin=None)


FLOAT32 = Widening(Category.FP32, (), "float32")
OUT_OF_FP8 = Widening(Category.LOWER_PRECISION_FP, PRODUCTS, "16 bits")
KEPT_AS_IS = Widening(None, (), "the forward's own form")


def widening(policy: Policy) -> Widening:
    """Return how bisecting ``policy`` widens a unit."""
    return OUT_OF_FP8 if policy.has_fp8 else FLOAT32


class Unit(Protocol):
    """A part of the program that is widened or not; hashable."""

    def __str__(self) -> str: ...

    def rule(self, name: str, region: str) -> Rule:
        """Return the rule that widens it."""


@dataclass(frozen=True)
class Subtree:
    """A module with everything inside; of the modules with 16-bit calls, ``glob`` covers only these."""

    path: str
    glob: str
    to: Widening = FLOAT32

    def __str__(self) -> str:
        return self.path or "the whole model"

    def rule(self, name: str, region: str) -> Rule:
        """Return a rule for every op that computes in the module."""
        return self.to.rule(name, region, self.to.ops, (self.glob,))


@dataclass(frozen=True)
class Own:
    """The ops that a module calls directly; its rule also widens these ops in the modules inside."""

    path: str
    glob: str
    ops: tuple[str, ...]
    to: Widening = FLOAT32

    def __str__(self) -> str:
        return f"{', '.join(map(short, self.ops))} in {self.path or 'the root module'}"

    def rule(self, name: str, region: str) -> Rule:
        """Return a rule for these ops; for the root module it has no glob, because none matches only the root."""
        return self.to.rule(name, region, self.ops, (self.glob,) if self.path else ())


@dataclass(frozen=True)
class Whole:
    """A rule of the policy, replaced by its widened version."""

    base: Rule
    to: Widening = FLOAT32

    def __str__(self) -> str:
        return f"rule {self.base.id}"

    def rule(self, name: str, region: str) -> Rule:
        """Return the widened rule; it replaces the original one, so ``name`` is not used."""
        return self.to.whole(self.base)


class ModuleTree:
    """The modules with calls that can be widened, as a tree of units."""

    def __init__(self, places: Iterable[ModuleOp], to: Widening = FLOAT32) -> None:
        self._to = to
        known = list(dict.fromkeys(places))
        self._paths = list(dict.fromkeys(place.module for place in known))
        self._ops = {path: tuple(place.op for place in known if place.module == path) for path in self._paths}
        self.root = self._subtree("")

    def parts(self, unit: Unit) -> Sequence[Unit]:
        """Return the parts of a unit: the module's own calls, if any, and the modules inside; empty for a leaf."""
        if not isinstance(unit, Subtree):
            return ()
        inside = f"{unit.path}." if unit.path else ""
        below = [path for path in self._paths if path != unit.path and path.startswith(inside)]
        if not below:
            return ()
        own = [Own(unit.path, unit.glob, self._ops[unit.path], self._to)] if unit.path in self._ops else []
        children = dict.fromkeys(inside + path[len(inside) :].partition(".")[0] for path in below)
        return (*own, *map(self._subtree, children))

    def _subtree(self, path: str) -> Subtree:
        return Subtree(path, exact(path, self._paths) if path else "**", self._to)


def rule_units(policy: Policy, places: Iterable[ModuleOp]) -> tuple[Whole, ...]:
    """Return the policy's rules that decide an op of ``places`` and that bisecting can widen, in order."""
    ops, to = {place.op for place in places}, widening(policy)
    low = Category.FP8 if to is OUT_OF_FP8 else Category.LOWER_PRECISION_FP
    lower = [rule for rule in policy.rules if rule.cast is low]
    return tuple(Whole(rule, to) for rule in lower if any(_for(rule, op) for op in ops))


def kept_rule_units(policy: Policy, packed: Iterable[KeptValue]) -> tuple[Whole, ...]:
    """Return the policy's rules that decided how one of the ``packed`` values is kept, in order."""
    used = {value.rule.id for value in packed if value.rule is not None}
    return tuple(Whole(rule, KEPT_AS_IS) for rule in policy.rules if rule.region == KEPT and rule.id in used)


def _for(rule: Rule, op: str) -> bool:
    return any(rule.covers_op(op, region) for region in ("forward", "backward"))


def with_units(policy: Policy, units: Sequence[Unit]) -> Policy:
    """Return ``policy`` with all ``units`` widened."""
    return replace(policy, rules=merged(policy.rules, unit_rules(policy, units)))


def unit_rules(policy: Policy, units: Sequence[Unit]) -> list[Rule]:
    """Return the rules of ``units``, with ids that the policy does not use."""
    region = "both" if policy.has_rules_for("backward") and widening(policy) is FLOAT32 else "forward"
    taken = {rule.id for rule in policy.rules}
    free = (name for at in range(1, len(taken) + len(units) + 2) if (name := f"bisected-{at}") not in taken)
    return [unit.rule(name, region) for unit, name in zip(units, free, strict=False)]


def merged(rules: Sequence[Rule], more: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return ``rules`` with ``more``: a rule with a known id replaces that rule, a new one is appended."""
    by_id = {rule.id: rule for rule in rules}
    return tuple((by_id | {rule.id: rule for rule in more}).values())
