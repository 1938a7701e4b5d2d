"""The units that bisecting widens: modules with all inside, a module's own calls, rules of the policy.

Under a policy with rules for fp8 a unit changes from fp8 to 16 bits, under any other from 16 bits to float32. In the
region "kept" the values that a unit computes are saved for the backward as the forward made them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fxamp.graph_text.model import KeptValue, short_op
from fxamp.policy import CastRule, Category, KeepRule, Policy, Rule
from fxamp.policy.model.cast_rule import PRODUCTS
from fxamp.policy.model.keep_rule import Keep
from fxamp.tools.policy.calibrate.rules import exact
from fxamp.tools.policy.places import ModuleOp


@dataclass(frozen=True)
class Unit:
    """A part of the program that is widened or not; ``words`` name it.

    ``ops`` and ``modules``: what a rule for it covers; without ops, every op that bisecting widens. ``base``: the
    policy's rule, if the unit is one. ``tree``: the path of a module that can be split into parts, else None.
    """

    words: str
    ops: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    base: CastRule | KeepRule | None = None
    tree: str | None = None

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Widening:
    """How a unit is widened: its rules get this ``cast``, for these ``ops``, or all if empty; ``words`` describe it.

    Without a cast its rules keep values for the backward as they are.
    """

    cast: Category | None
    ops: tuple[str, ...]
    words: str

    def rule(self, unit: Unit, name: str, region: str) -> Rule:
        """Return the rule that widens a unit: its base under its own id, or one called ``name``."""
        if isinstance(unit.base, KeepRule):
            return replace(unit.base, keep=Keep.AS_IS, block=0, origin=None)
        ops = unit.ops or self.ops
        if self.cast is None:
            return KeepRule(name, Keep.AS_IS, ops, modules=unit.modules)
        if unit.base is not None:
            return replace(unit.base, cast=self.cast, recipe="", inputs=(), origin=None)
        return CastRule(name, self.cast, ops, modules=unit.modules, region=region)


FLOAT32 = Widening(Category.FP32, (), "float32")
OUT_OF_FP8 = Widening(Category.LOWER_PRECISION_FP, PRODUCTS, "16 bits")
KEPT_AS_IS = Widening(None, (), "the forward's own form")


class ModuleTree:
    """The modules with calls that can be widened, as a tree of units."""

    def __init__(self, places: Iterable[ModuleOp]) -> None:
        places = list(dict.fromkeys(places))
        self._paths = list(dict.fromkeys(place.module for place in places))
        self._ops = {path: tuple(place.op for place in places if place.module == path) for path in self._paths}
        self.root = self._subtree("")

    def parts(self, unit: Unit) -> Sequence[Unit]:
        """Return the parts of a unit: the module's own calls, if any, and the modules inside; empty for a leaf."""
        if unit.tree is None:
            return ()
        inside = f"{unit.tree}." if unit.tree else ""
        below = [path for path in self._paths if path != unit.tree and path.startswith(inside)]
        if not below:
            return ()
        own = [self._own(unit)] if unit.tree in self._ops else []
        children = dict.fromkeys(inside + path[len(inside) :].partition(".")[0] for path in below)
        return (*own, *map(self._subtree, children))

    def _subtree(self, path: str) -> Unit:
        """Return a module with all inside; of the modules with calls to widen, its glob covers only these."""
        glob = exact(path, self._paths) if path else "**"
        return Unit(path or "the whole model", modules=(glob,), tree=path)

    def _own(self, unit: Unit) -> Unit:
        """Return a module's own calls; the rule for them has no glob for the root, because none matches only that.

        It also widens these ops in the modules inside.
        """
        ops = self._ops[unit.tree or ""]
        words = f"{', '.join(map(short_op, ops))} in {unit.tree or 'the root module'}"
        return Unit(words, ops, unit.modules if unit.tree else ())


def rule_units(policy: Policy, places: Iterable[ModuleOp]) -> tuple[Unit, ...]:
    """Return the policy's rules that decide an op of ``places`` and that bisecting can widen, in order."""
    casts = [rule for rule in policy.rules if isinstance(rule, CastRule)]
    low = [rule for rule in casts if rule.in_fp8 or (not policy.has_fp8 and rule.cast is Category.LOWER_PRECISION_FP)]
    sites = [(place.op, region) for place in places for region in ("forward", "backward")]
    return _units(rule for rule in low if any(rule.covers_op(*site) for site in sites))


def kept_rule_units(policy: Policy, packed: Iterable[KeptValue]) -> tuple[Unit, ...]:
    """Return the policy's rules that decided how one of the ``packed`` values is kept, in order."""
    ids = {value.rule.id for value in packed if value.rule is not None}
    return _units(rule for rule in policy.rules if isinstance(rule, KeepRule) and rule.id in ids)


def _units(rules: Iterable[CastRule | KeepRule]) -> tuple[Unit, ...]:
    return tuple(Unit(f"rule {rule.id}", base=rule) for rule in rules)


def with_units(policy: Policy, units: Sequence[Unit], to: Widening) -> Policy:
    """Return ``policy`` with all ``units`` widened: a rule with a known id replaces that rule, a new one is last."""
    rules = {rule.id: rule for rule in (*policy.rules, *unit_rules(policy, units, to))}
    return replace(policy, rules=tuple(rules.values()))


def unit_rules(policy: Policy, units: Sequence[Unit], to: Widening) -> list[Rule]:
    """Return the rules of ``units``, with ids that the policy does not use."""
    region = "both" if policy.has_rules_for("backward") and to is FLOAT32 else "forward"
    taken = {rule.id for rule in policy.rules}
    free = (name for at in range(1, len(taken) + len(units) + 2) if (name := f"bisected-{at}") not in taken)
    return [to.rule(unit, name, region) for unit, name in zip(units, free, strict=False)]
