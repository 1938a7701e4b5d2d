"""What a policy can decide about a step, as options: each is a few rules of the shipped variants, for one scope."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fxamp.policy import Category, Policy, Rule, variant_names
from fxamp.policy.model.chunks import LOSS
from fxamp.policy.model.keep import KEPT
from fxamp.policy.model.match import OF_EXPERTS
from fxamp.policy.model.module_globs import covers_class, covers_module
from fxamp.policy.model.optimizer_table import OptimizerPrecision
from fxamp.policy.model.recipe import FNUZ, RECIPES, RECIPES_OF
from fxamp.policy.model.site import Site, TensorFacts
from fxamp.tools.policy.fit.layers import Scope

#: Rules of lean that pack values, those that say which values the backward computes again, and single values.
_PACKED = ("kept-in-8-bits", "kept-relus", "kept-for-relus")
_RECOMPUTED = ("kept-activations", "kept-norms", "kept-gates", "kept-repeated-heads", "kept-pointwise-convolutions")
_ALONE = (*_PACKED, *_RECOMPUTED, "kept-embeddings", "kept-for-norms", "kept-values-of-attention", "kept-logits")

#: Rules of the variants for mixtures of experts that say how the products of experts run.
_EXPERTS = ("moe-experts", "moe-experts-matmul")

#: Between the id of a shipped rule and the name of its scope.
MARK = "--"

#: The name of the option that adds nothing.
AS_BASE = "as the base"

_STATES = ("bfloat16", "8bit")

#: Values that share a scale where 8 bits are to be more exact than in the shipped variants; rows of a loss's chunks.
_FINE, _ROWS = 32, (4096, 2048, 1024)


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

    def nearest(self, policy: Policy) -> int:
        """Return the place of the option that shares most with ``policy``: of its rules, more than ``policy`` lacks."""

        def shared(option: Option) -> int:
            parts = [rule in policy.rules for rule in option.rules]
            parts += [option.optimizer == policy.optimizer] if option.optimizer else []
            return 2 * sum(parts) - len(parts)

        return max(range(len(self.options)), key=lambda at: (shared(self.options[at]), at))


class Language:
    """What the shipped variants of a policy's device and dtype say, cut into options.

    ``formats``: the casts below 16 bits in which the GPU multiplies, of those with recipes, as :class:`~.gpus.Gpu` has
    them.
    """

    def __init__(self, base: Policy, formats: Collection[str] = ()) -> None:
        self._base, self.formats = base, formats
        family = f"{base.device}-{base.lower_precision_fp}"
        lean, leanest = (Policy.load(f"{family}-{variant}").rules for variant in ("lean", "leanest"))
        self._kept = {rule.id: rule for rule in (*leanest, *lean) if rule.region == KEPT}
        self._again = {rule.id: rule for rule in leanest if rule.region == KEPT}
        self._chunks = [replace(rule, chunks=rows) for rule in lean if rule.region == LOSS for rows in _ROWS]
        self._order = {name: at for at, name in enumerate(dict.fromkeys(rule.id for rule in (*lean, *leanest)))}
        fast = Policy.load(f"{family}-fast").rules
        own = {rule.id for rule in Policy.load(f"{family}-fast-norms").rules}
        self._norms = [r for r in fast if r.id in ("norm-layers", "rms-norm") and base.device == "cuda"]
        self._stream = [rule for rule in fast if rule.id not in own]
        table = {rule.id for rule in Policy.load(family).rules}
        mixture = Policy.load(f"{family}-moe")
        self._exact = [rule for rule in mixture.rules if rule.id not in table and rule.cast is Category.FP32]
        variants = [Policy.load(name) for name in variant_names() if name.startswith(f"{family}-")]
        low = [variant for variant in variants if variant.has_fp8 and self.multiplies(variant)]
        self._products = _products(
            [rule for rule in variant.rules if rule.id not in table] for variant in low if not variant.casts_of_experts
        )
        self._experts = {"16 bits": _rules_of_experts(mixture)}
        self._experts |= _products(_rules_of_experts(variant) for variant in low if variant.casts_of_experts)

    def multiplies(self, policy: Policy) -> bool:
        """Whether the GPU has the products below 16 bits that ``policy`` asks for, those of experts too."""
        casts = {*map(str, policy.products), *(cast + OF_EXPERTS for cast in policy.casts_of_experts)}
        return casts <= {*self.formats}

    def decisions(self, scopes: Sequence[Scope], model: Any) -> list[Decision]:
        """Return all decisions on ``model``: those of each scope, then those of the whole model."""
        every = [*(decision for scope in scopes for decision in self._of(scope, model)), *self._of_all(model)]
        return [decision for decision in every if len(decision.options) > 1]

    def _of(self, scope: Scope, model: Any) -> Iterable[Decision]:
        norm = self._base.rule_for("aten::layer_norm")
        norms = [] if norm is None or norm.cast is Category.LOWER_PRECISION_FP else self._norms
        both = [*norms, *self._stream] if norms else []
        forms = {"norms in 16 bits": norms, "residual stream in 16 bits": self._stream, "both in 16 bits": both}
        yield self._decision("norms and residual stream", scope, forms)
        if not self._base.has_fp8:
            recipes = {word: rules for word, rules in self._products.items() if self._multiplies(rules, scope, model)}
            yield self._decision("products", scope, recipes)
        if not self._base.casts_of_experts and _has_experts(model, scope):
            own = {word: rules for word, rules in self._experts.items() if not {*rules} <= {*self._base.rules}}
            yield self._decision("products of experts", scope, own)
        if not self._base.has_rules_for(KEPT):
            yield self._decision("kept values", scope, self._forms(model))

    def _forms(self, model: Any) -> dict[str, list[Rule]]:
        """Return forms of kept values, each smaller than the one before: what is computed again need not be packed."""
        packed, again = ([self._kept[name] for name in names] for names in (_PACKED, _RECOMPUTED))
        fine = [replace(rule, block=_FINE) for rule in packed]
        stream, values = self._kept["kept-for-norms"], self._kept["kept-values-of-attention"]
        paths = [path for path, _ in model.named_modules()] if isinstance(model, nn.Module) else [""]
        attention = [values] if any(covers_module(glob, path) for glob in values.modules for path in paths) else []
        forms = {"norms' inputs in 16 bits": [stream], "computed again": [stream, *again]}
        if attention:
            forms["computed again, attention's values too"] = [stream, *again, *attention]
        forms[f"8 bits in blocks of {_FINE}, or computed again"] = [*fine, stream, *again]
        forms["8 bits, or computed again"] = [*packed, stream, *again]
        forms["8 bits, norms' inputs too, or computed again"] = [*packed, *again, *attention]
        return forms

    def _of_all(self, model: Any) -> Iterable[Decision]:
        whole = Scope("model")
        if isinstance(model, nn.Module):
            yield self._decision("routers and heads", whole, self._in_float32(model))
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

    def _in_float32(self, model: nn.Module) -> dict[str, list[Rule]]:
        """Return the rules of mixtures of experts, where ``model`` has a router or a head that they name."""
        known = {rule.id for rule in self._base.rules}
        exact = [rule for rule in self._exact if rule.id not in known]
        return {"in float32": exact} if any(_covers_part(rule, model) for rule in exact) else {}

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
    """Return ``rule`` for ``scopes`` alone, with an id of its own; as it is for all parts of the model."""
    if not all(scope.modules for scope in scopes) or len(scopes) in (0, *(scope.of for scope in scopes)):
        return rule
    parts = [part for scope in scopes for part in scope.modules]
    inside = [f"{part}.**.{own}" for part in parts for own in rule.modules]
    inside += [part for part in parts if any(covers_module(own, part.removeprefix(".")) for own in rule.modules)]
    words = "-".join(scope.word for scope in scopes)
    return replace(rule, id=f"{rule.id}{MARK}{words}", modules=tuple(inside or parts))


def _rules_of_experts(policy: Policy) -> list[Rule]:
    """Return what a variant for mixtures of experts says of their products."""
    return [rule for rule in policy.rules if rule.id in _EXPERTS]


def _has_experts(model: Any, scope: Scope) -> bool:
    """Whether ``scope`` of ``model`` has a weight with a matrix for each expert; of what is no module, it may."""
    if not isinstance(model, nn.Module):
        return True
    inside = [
        module
        for path, module in model.named_modules()
        if not scope.modules or any(covers_module(glob, path) for glob in scope.modules)
    ]
    others = (module for module in inside if not isinstance(module, nn.modules.conv._ConvNd))
    return any(value.dim() == 3 for module in others for value in module.parameters(recurse=False))


def _covers_part(rule: Rule, model: nn.Module) -> bool:
    """Whether a module of ``model`` is of the paths and classes that ``rule`` names."""
    parts = [(path, type(part).__qualname__) for path, part in model.named_modules()]
    at = [part for part in parts if not rule.modules or any(covers_module(glob, part[0]) for glob in rule.modules)]
    classes = rule.module_classes
    return any(not classes or any(covers_class(glob, name) for glob in classes) for _, name in at)


def _products(variants: Iterable[Sequence[Rule]]) -> dict[str, list[Rule]]:
    """Return the rules of each recipe, by cast and recipe: those of the variant that has it, or else of another one."""
    own: dict[str, list[Rule]] = {}
    others: dict[str, list[Rule]] = {}
    for rules in variants:
        cast, shipped = next((Category(rule.cast), rule.recipe) for rule in rules if rule.cast and rule.in_fp8)
        experts = any(rule.in_fp8 and rule.of_experts for rule in rules)
        of_nvidia = [recipe for recipe in RECIPES_OF[cast] if recipe not in FNUZ.values()]
        for recipe in (recipe for recipe in of_nvidia if RECIPES[recipe].grouped or not experts):
            table = own if recipe == shipped else others
            table[f"{cast} {recipe}"] = [replace(rule, recipe=recipe) if rule.in_fp8 else rule for rule in rules]
    return others | own
