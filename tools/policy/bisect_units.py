"""What bisecting puts into float32, piece by piece: subtrees of modules, a module's own calls, rules of the policy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fxamp.policy import Category, Policy, Rule
from fxamp.tools.policy.calibrate_rules import exact, short
from fxamp.tools.policy.places import ModuleOp


class Unit(Protocol):
    """A piece of the program that is in float32 or not; hashable."""

    def __str__(self) -> str: ...

    def rule(self, name: str, region: str) -> Rule:
        """The rule that puts it into float32."""


@dataclass(frozen=True)
class Subtree:
    """A module with all that is in it; ``glob`` covers it, and of the modules with 16-bit calls no other."""

    path: str
    glob: str

    def __str__(self) -> str:
        return self.path or "the whole model"

    def rule(self, name: str, region: str) -> Rule:
        """A rule for everything that computes in the module."""
        return Rule(name, Category.FP32, modules=(self.glob,), region=region)


@dataclass(frozen=True)
class Own:
    """The ops that a module calls itself, beside the modules in it, which have these ops in float32 too."""

    path: str
    glob: str
    ops: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(short, self.ops))} in {self.path or 'the root module'}"

    def rule(self, name: str, region: str) -> Rule:
        """A rule for these ops; for them everywhere if the module is the root, which no glob names alone."""
        return Rule(name, Category.FP32, self.ops, modules=(self.glob,) if self.path else (), region=region)


@dataclass(frozen=True)
class Whole:
    """A rule of the policy, turned into one for float32."""

    base: Rule

    def __str__(self) -> str:
        return f"rule {self.base.id}"

    def rule(self, name: str, region: str) -> Rule:
        """The same rule with float32: it takes the other's place, so that ``name`` is not used."""
        return replace(self.base, cast=Category.FP32, inputs=(), origin=None)


class ModuleTree:
    """The modules with calls that the policy runs in 16 bits, as units: a unit's parts are what it is made of."""

    def __init__(self, places: Iterable[ModuleOp]) -> None:
        known = list(dict.fromkeys(places))
        self._paths = list(dict.fromkeys(place.module for place in known))
        self._ops = {path: tuple(place.op for place in known if place.module == path) for path in self._paths}
        self.root = self._subtree("")

    def parts(self, unit: Unit) -> Sequence[Unit]:
        """The module's own calls, if it has any, and the modules in it; nothing for what has no modules in it."""
        if not isinstance(unit, Subtree):
            return ()
        inside = f"{unit.path}." if unit.path else ""
        below = [path for path in self._paths if path != unit.path and path.startswith(inside)]
        if not below:
            return ()
        own = [Own(unit.path, unit.glob, self._ops[unit.path])] if unit.path in self._ops else []
        children = dict.fromkeys(inside + path[len(inside) :].partition(".")[0] for path in below)
        return (*own, *map(self._subtree, children))

    def _subtree(self, path: str) -> Subtree:
        return Subtree(path, exact(path, self._paths) if path else "**")


def rule_units(policy: Policy, places: Iterable[ModuleOp]) -> tuple[Whole, ...]:
    """The policy's rules for 16 bits that are for an op of ``places``, in their order."""
    ops = {place.op for place in places}
    lower = [rule for rule in policy.rules if rule.cast is Category.LOWER_PRECISION_FP]
    return tuple(Whole(rule) for rule in lower if any(_for(rule, op) for op in ops))


def _for(rule: Rule, op: str) -> bool:
    return any(rule.covers_op(op, region) for region in ("forward", "backward"))


def with_units(policy: Policy, units: Sequence[Unit]) -> Policy:
    """``policy`` with all ``units`` in float32."""
    return replace(policy, rules=merged(policy.rules, unit_rules(policy, units)))


def unit_rules(policy: Policy, units: Sequence[Unit]) -> list[Rule]:
    """The rules of ``units``, with ids that the policy does not have."""
    region = "both" if policy.has_rules_for("backward") else "forward"
    taken = {rule.id for rule in policy.rules}
    free = (name for at in range(1, len(taken) + len(units) + 2) if (name := f"bisected-{at}") not in taken)
    return [unit.rule(name, region) for unit, name in zip(units, free, strict=False)]


def merged(rules: Sequence[Rule], more: Sequence[Rule]) -> tuple[Rule, ...]:
    """``rules`` with ``more``: one of a known id takes that one's place, a new one goes last."""
    by_id = {rule.id: rule for rule in rules}
    return tuple((by_id | {rule.id: rule for rule in more}).values())
