"""What a policy can decide about a step, as options: each is a few rules of the shipped variants, for one scope."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fxamp.policy import Category, Policy, Rule, variant_names
from fxamp.policy.model.chunks import LOSS
from fxamp.policy.model.keep import KEPT, Keep
from fxamp.policy.model.module_globs import covers_module
from fxamp.policy.model.optimizer_table import OptimizerPrecision
from fxamp.policy.model.site import Site, TensorFacts
from fxamp.tools.policy.fit.layers import Scope

#: Rules of lean that pack values, those that say which values the backward computes again, and single values.
_PACKED = ("kept-in-8-bits", "kept-relus", "kept-for-relus")
_RECOMPUTED = ("kept-activations", "kept-norms", "kept-gates", "kept-repeated-heads", "kept-pointwise-convolutions")
_ALONE = (*_PACKED, *_RECOMPUTED, "kept-embeddings", "kept-for-norms", "kept-values-of-attention", "kept-logits")

#: Between the id of a shipped rule and the name of its scope.
MARK = "--"

#: The name of the option that adds nothing.
AS_BASE = "as the base"

_STATES = ("bfloat16", "8bit")


@dataclass(frozen=True)
class Option:
    """One way to decide: rules for a scope that it adds to the base, or the precision of the optimizer's state."""

    name: str
    scope: Scope
    rules: tuple[Rule, ...] = ()
    optimizer: OptimizerPrecision | None = None


@dataclass(frozen=True)
class Decision:
    """A question about one scope, and its options; the first one is what the base policy does."""

    name: str
    scope: Scope
    options: tuple[Option, ...]


class Language:
    """What the shipped variants of a policy's device and dtype say, cut into options.

    ``formats``: the casts to few bits that the GPU multiplies in, such as "fp8".
    """

    def __init__(self, base: Policy, formats: Collection[str] = ()) -> None:
        self._base, self.formats = base, formats
        family = f"{base.device}-{base.lower_precision_fp}"
        lean, leanest = (Policy.load(f"{family}-{variant}").rules for variant in ("lean", "leanest"))
        self._kept = {rule.id: rule for rule in (*leanest, *lean) if rule.region == KEPT}
        self._again = {rule.id: rule for rule in leanest if rule.region == KEPT}
        self._chunks = [rule for rule in (*lean, *leanest) if rule.region == LOSS]
        self._order = {name: at for at, name in enumerate(dict.fromkeys(rule.id for rule in (*lean, *leanest)))}
        fast = Policy.load(f"{family}-fast").rules
        own = {rule.id for rule in Policy.load(f"{family}-fast-norms").rules}
        self._norms = [r for r in fast if r.id in ("norm-layers", "rms-norm") and base.device == "cuda"]
        self._stream = [rule for rule in fast if rule.id not in own]
        table = {rule.id for rule in Policy.load(family).rules}
        self._products: dict[str, list[Rule]] = {"fp8": [], "fp8-rowwise": [], "mxfp8": [], "nvfp4": []}
        for kind in self._products:
            name = f"{family}-{kind}"
            if name in variant_names() and self.multiplies(Policy.load(name)):
                self._products[kind] = [rule for rule in Policy.load(name).rules if rule.id not in table]

    def multiplies(self, policy: Policy) -> bool:
        """Whether the GPU has the products in 8 bits that ``policy`` asks for."""
        return {str(rule.cast) for rule in policy.rules if rule.in_fp8} <= {*self.formats}

    def decisions(self, scopes: Sequence[Scope], model: Any) -> list[Decision]:
        """Return all decisions on ``model``: those of each scope, then those of the whole model."""
        return [*(decision for scope in scopes for decision in self._of(scope, model)), *self._of_all()]

    def _of(self, scope: Scope, model: Any) -> Iterable[Decision]:
        norm = self._base.rule_for("aten::layer_norm")
        if self._norms and norm is not None and norm.cast is not Category.LOWER_PRECISION_FP:
            yield self._decision("norms", scope, {"16 bits": self._norms})
        if not self._base.has_fp8 and self.formats:
            recipes = {word: rules for word, rules in self._recipes().items() if self._multiplies(rules, scope, model)}
            yield self._decision("products", scope, recipes)
        if not self._base.has_rules_for(KEPT):
            packed = [self._kept[name] for name in _PACKED]
            floats = [replace(rule, keep=Keep.FLOAT8_E4M3FN) for rule in packed]
            stream = [self._kept["kept-for-norms"]]
            options = {"norms' inputs in 16 bits": stream, "8-bit integers, norms' inputs in 16 bits": packed + stream}
            options |= {"8-bit floats, norms' inputs in 16 bits": floats + stream, "8-bit integers": packed}
            yield self._decision("kept values", scope, options)
            again = [self._kept[name] for name in _RECOMPUTED]
            values = self._kept["kept-values-of-attention"]
            options = {"activations, norms, gates": again}
            paths = [path for path, _ in model.named_modules()] if isinstance(model, nn.Module) else [""]
            if any(covers_module(glob, path) for glob in values.modules for path in paths):
                options["and attention's values"] = [*again, values]
            yield self._decision("computed again", scope, options)

    def _of_all(self) -> Iterable[Decision]:
        whole = Scope("model")
        if self._stream:
            yield self._decision("residual stream", whole, {"16 bits": self._stream})
        if not self._base.has_rules_for(KEPT):
            yield self._decision("embeddings", whole, {"looked up again": [self._kept["kept-embeddings"]]})
            weights = [self._again["kept-copies-of-inputs"], self._again["kept-images"]]
            yield self._decision("weights' copies", whole, {"computed again": weights})
        loss = {} if self._base.has_rules_for(KEPT) else {"logits computed again": [self._kept["kept-logits"]]}
        if not self._base.has_rules_for(LOSS):
            loss |= {f"in chunks of {rule.chunks}": [rule] for rule in self._chunks}
        yield self._decision("loss", whole, loss)
        if self._base.optimizer is None:
            forms = [Option(form, whole, optimizer=OptimizerPrecision({"*": form}, "stochastic")) for form in _STATES]
            yield Decision("optimizer's state", whole, (Option(AS_BASE, whole), *forms))

    def _recipes(self) -> dict[str, list[Rule]]:
        whole, rowwise, *blocks = self._products.values()
        precise = [replace(rule, recipe="rowwise_with_gw_hp") if rule.recipe else rule for rule in rowwise]
        options = {"fp8 tensorwise": whole, "fp8 rowwise": rowwise, "fp8 rowwise_with_gw_hp": precise}
        return options | dict(zip(("mxfp8 rceil", "nvfp4 pretraining"), blocks, strict=True))

    def _multiplies(self, rules: list[Rule], scope: Scope, model: Any) -> bool:
        """Whether a weight of ``model`` is multiplied in fp8 under ``rules``, as far as its size and module tell."""
        policy = self.policy(self._base, [Option("", scope, tuple(rules))])
        for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.dim() == 2 and not isinstance(module, nn.Embedding):
                facts = TensorFacts("float32", tuple(weight.shape))
                for op, argument in (("aten::linear", "weight"), ("aten::addmm.default", "mat2")):
                    rule = policy.ruling(Site(op, path, args={argument: facts})).rule
                    if rule is not None and rule.in_fp8:
                        return True
        return not isinstance(model, nn.Module)

    def _decision(self, name: str, scope: Scope, options: dict[str, list[Rule]]) -> Decision:
        forms = [Option(word, scope, tuple(rules)) for word, rules in options.items() if rules]
        return Decision(name, scope, (Option(AS_BASE, scope), *forms))

    def policy(self, base: Policy, options: Sequence[Option]) -> Policy:
        """Return ``base`` with the rules of ``options``, in the order in which the shipped variants have them.

        Scopes that have the same rule share one.
        """
        scopes: dict[Rule, list[Scope]] = {}
        for option in options:
            for rule in option.rules:
                scopes.setdefault(rule, []).append(option.scope)
        rules = list(scopes)
        if any(rule.region == KEPT for rule in rules):
            own = {rule.id for rule in rules}
            rules += [rule for name, rule in self._kept.items() if name not in own.union(_ALONE)]
        rules.sort(key=lambda rule: self._order.get(rule.id, -1))
        every = (*base.rules, *(_scoped(rule, scopes.get(rule, [])) for rule in rules))
        state = next((option.optimizer for option in options if option.optimizer), base.optimizer)
        return replace(base, rules=tuple({rule.id: rule for rule in every}.values()), optimizer=state)


def _scoped(rule: Rule, scopes: Sequence[Scope]) -> Rule:
    """Return ``rule`` for ``scopes`` alone, with an id of its own."""
    parts = [part for scope in scopes for part in scope.modules]
    if not parts:
        return rule
    inside = [f"{part}.**.{own}" for part in parts for own in rule.modules]
    inside += [part for part in parts if any(covers_module(own, part.removeprefix(".")) for own in rule.modules)]
    words = "-".join(scope.word for scope in scopes)
    return replace(rule, id=f"{rule.id}{MARK}{words}", modules=tuple(inside or parts))
