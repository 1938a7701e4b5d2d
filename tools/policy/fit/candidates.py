"""The policies that are compared: the base, the shipped variants added to it, and combinations of these."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fxamp.policy import Policy, Rule, variant_names
from fxamp.policy.model.match import OF_EXPERTS
from fxamp.policy.model.optimizer_table import OptimizerPrecision
from fxamp.policy.model.site import Site, TensorFacts

#: The variants that are combined; the shipped policy of the first one is what the answer's file extends.
COMBINATIONS = (("lean", "fast"), ("leanest", "fast"), ("fp8-rowwise", "lean"), ("mxfp8", "lean"))

#: The precision of the optimizer's state that lean has, for policies without an ``[optimizer]`` table.
STATE = OptimizerPrecision({"*": "8bit"}, "stochastic")

#: What that adds to a candidate's name.
STATE_SUFFIX = " + 8-bit state"

#: The variants that 8-bit state is added to; "" is the base.
_WITH_STATE = ("", "fast")

#: The rule of ``--loss-only``.
LOSS_ONLY = Rule(
    "loss-only",
    drop=True,
    args={"result": {"dtype": ["float32", "bfloat16", "float16"], "rank": ">=1"}},
    why="The training reads the loss alone.",
)


@dataclass(frozen=True)
class Candidate:
    """A policy to compare. ``variants``: those added to the base. ``extends``: the policy that its file extends."""

    name: str
    variants: tuple[str, ...]
    policy: Policy
    extends: str

    @property
    def combined(self) -> bool:
        """Whether it is neither a shipped policy nor the unchanged base."""
        return len(self.variants) > 1 or self.name.endswith(STATE_SUFFIX)

    @property
    def rounds_state(self) -> bool:
        """Whether the optimizer keeps its state in fewer bits; that rounding is not in the gradient's error."""
        return self.policy.optimizer is not None


@dataclass(frozen=True)
class Family:
    """The base policy and the shipped variants of its device and dtype.

    ``base_name``: the name or path of ``base``. ``formats``: the casts below 16 bits in which the GPU multiplies, as
    :attr:`.gpus.Gpu.formats` lists them.
    """

    base_name: str
    base: Policy
    formats: Collection[str]

    @property
    def name(self) -> str:
        """The name of the shipped policy that equals autocast, such as "cuda-bfloat16"."""
        return f"{self.base.device}-{self.base.lower_precision_fp}"

    def candidates(self, model: Any, loss_only: bool) -> Iterator[Candidate]:
        """Yield the base first, then every variant and combination that the GPU can run and that concerns ``model``.

        ``model``: the one on which errors are measured. ``loss_only``: whether all results but the loss are dropped.
        """
        singles = (name.removeprefix(f"{self.name}-") for name in variant_names() if name.startswith(f"{self.name}-"))
        variants = [(), *((word,) for word in singles), *COMBINATIONS]
        seen = set()
        for words in variants:
            if not all(self._concerns(word, model) for word in words):
                continue
            candidate = self._candidate(words, loss_only)
            if candidate.policy.digest in seen:
                continue
            seen.add(candidate.policy.digest)
            yield candidate
            if "".join(words) in _WITH_STATE and not candidate.rounds_state:
                policy = replace(candidate.policy, optimizer=STATE)
                yield replace(candidate, name=candidate.name + STATE_SUFFIX, policy=policy)

    def compose(self, variants: Collection[str]) -> Policy:
        """Return the base with what ``variants`` add to their family, the later over the earlier ones."""
        family, policy = Policy.load(self.name), self.base
        for word in variants:
            variant = Policy.load(f"{self.name}-{word}")
            own = [rule for rule in variant.rules if rule not in family.rules]
            rules = {rule.id: rule for rule in (*policy.rules, *own)}
            policy = replace(
                policy,
                rules=tuple(rules.values()),
                outputs=variant.outputs if variant.outputs != family.outputs else policy.outputs,
                optimizer=variant.optimizer or policy.optimizer,
                capability=variant.capability or policy.capability,
                arch=variant.arch or policy.arch,
            )
        return policy

    def _candidate(self, variants: tuple[str, ...], loss_only: bool) -> Candidate:
        shipped = self.base == Policy.load(self.name)
        stem = self.name if shipped else self.base.name
        policy = self.compose(variants)
        if loss_only:
            policy = replace(policy, rules=(*policy.rules, LOSS_ONLY))
        extends = f"{self.name}-{variants[0]}" if shipped and variants else self.base_name
        return Candidate(f"{stem}-{'+'.join(variants)}" if variants else stem, variants, policy, extends)

    def _concerns(self, variant: str, model: Any) -> bool:
        name = f"{self.name}-{variant}"
        if name not in variant_names():
            return False
        policy = Policy.load(name)
        casts = {*map(str, policy.products), *(cast + OF_EXPERTS for cast in policy.casts_of_experts)}
        if not casts <= {*self.formats}:
            return False
        if variant.endswith("moe") and not _has_experts(model):
            return False
        return not policy.has_fp8 or _multiplies_below_16_bits(policy, model)


def _has_experts(model: Any) -> bool:
    """Whether a weight of ``model`` holds a matrix for each expert; a function may have one."""
    if not isinstance(model, nn.Module):
        return True
    others = (module for module in model.modules() if not isinstance(module, nn.modules.conv._ConvNd))
    return any(value.dim() == 3 for module in others for value in module.parameters(recurse=False))


def _multiplies_below_16_bits(policy: Policy, model: Any) -> bool:
    """Whether ``policy`` multiplies a weight of ``model`` in fp8 or below, by its shape and its module."""
    if not isinstance(model, nn.Module):
        return True
    for path, module in model.named_modules():
        for weight in module.parameters(recurse=False):
            if weight.dim() not in (2, 3) or isinstance(module, nn.Embedding):
                continue
            facts = TensorFacts("float32", tuple(weight.shape))
            for op, argument in (("aten::linear", "weight"), ("aten::addmm.default", "mat2"), ("aten::bmm", "mat2")):
                rule = policy.ruling(Site(op, path, args={argument: facts})).rule
                if rule is not None and rule.in_fp8:
                    return True
    return False
