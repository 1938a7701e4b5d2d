"""A policy as a value: the floating dtype in which each op runs, on one device."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from os import PathLike

from fxamp.argument_names import named_arguments
from fxamp.errors import PolicyError
from fxamp.policy.file.dump import write_text
from fxamp.policy.file.load import read_file, read_text
from fxamp.policy.model.cast_rule import CastRule
from fxamp.policy.model.category import Category
from fxamp.policy.model.comparisons import holds
from fxamp.policy.model.loss_scale import LossScale
from fxamp.policy.model.match import OF_EXPERTS, Machine, Match, machine
from fxamp.policy.model.optimizer_table import OptimizerPrecision
from fxamp.policy.model.rule import Origin, Rule, holds_in
from fxamp.policy.model.rulings import RuleIndex, Ruling
from fxamp.policy.model.settings import ACCEPTED_VALUES, UNLISTED_ID, unknown_value
from fxamp.policy.model.site import REGIONS, Site


@named_arguments
@dataclass(frozen=True)
class Policy:
    """The dtype in which each op of a program runs. Policies are equal if they decide the same, whatever their source.

    ``device``: "cuda", "cpu", "xpu", "mps" or "mtia". ``lower_precision_fp``: "float16" or "bfloat16". ``outputs``:
    "captured" (a compiled graph's outputs keep the dtypes it was captured with) or "keep" (the dtypes the casts give).
    ``rules``: the last rule that covers a call decides. ``unlisted`` decides calls that no rule covers: "follow" (their
    inputs), or a category. ``loss_scale``: the scaler's settings, or None. ``optimizer``: the precision in which a
    compiled optimizer stores its state, or None. ``capability``, ``arch``, ``cpu_features`` and ``torch`` are
    conditions on the machine, checked by :meth:`resolve`.

    ``sources``: the files it was read from. ``origins``: where each setting was written, by its key. ``unchecked``:
    the conditions that :meth:`resolve` could not check.

    Raises PolicyError if a field has a value that is not accepted.
    """

    name: str = field(compare=False)
    device: str
    lower_precision_fp: str
    outputs: str = "captured"
    rules: tuple[Rule, ...] = ()
    sources: tuple[str, ...] = field(default=(), compare=False)
    unlisted: str = "follow"
    capability: str = ""
    cpu_features: tuple[str, ...] = ()
    torch: str = ""
    loss_scale: LossScale | None = None
    optimizer: OptimizerPrecision | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False)
    unchecked: tuple[str, ...] = field(default=(), compare=False)
    arch: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key, accepted in ACCEPTED_VALUES.items():
            value = getattr(self, key)
            if value not in accepted:
                raise PolicyError(f"policy {self.name!r}: {unknown_value(key, value, accepted)}")
        for key in ("cpu_features", "arch"):
            object.__setattr__(self, key, tuple(getattr(self, key)))
        for _, problem in self._match.problems():
            raise PolicyError(f"policy {self.name!r}: {problem}")

    @staticmethod
    @named_arguments
    def load(name_or_path: "str | PathLike[str]") -> "Policy":
        """Read a built-in policy by its name ("cuda-float16") or a file by its path, which ends in ``.toml``.

        Raises PolicyError, listing every mistake with its file and line.
        """
        return Policy(**read_file(name_or_path))

    @staticmethod
    @named_arguments
    def loads(text: str, name: str = "policy") -> "Policy":
        """Read a policy from the text of a file; files that it extends are looked up in the working directory first.

        Raises PolicyError, listing every mistake as ``name:line: message``.
        """
        return Policy(**read_text(text, name))

    @named_arguments
    def dumps(self, origins: bool = False) -> str:
        """Return the text of one policy file with the same meaning; with ``origins`` each line has its origin."""
        return write_text({key.name: getattr(self, key.name) for key in fields(self)}, origins)

    @named_arguments
    def resolve(
        self,
        device: str | None = None,
        torch_version: str | None = None,
        *,
        capability: "str | tuple[int, ...] | None" = None,
        cpu_features: Iterable[str] | None = None,
        arch: str | None = None,
    ) -> "Policy":
        """Return the policy for one machine: without rules whose ``torch`` condition fails, recipes in its formats.

        ``device``: where the program runs, "cuda" or "cuda:1". ``torch_version``: that of the installed torch by
        default. ``capability``: the compute capability of an NVIDIA GPU, "8.0" or (8, 0); ``arch``: the architecture
        of an AMD GPU, "gfx942". ``cpu_features``: the names that ``torch.cpu.get_capabilities()`` reports. Conditions
        on unknown facts are not checked; ``unchecked`` lists them.

        Raises PolicyError if a condition fails, with the fact.
        """
        kind = None if device is None else device.partition(":")[0]
        if kind is not None and kind != self.device:
            raise PolicyError(
                f"policy {self.name!r} is for device {self.device!r}, but the program runs on {kind!r}; accepted: "
                f"a policy with [match] device = {kind!r}, such as '{kind}-{self.lower_precision_fp}'"
            )
        here = machine(torch_version, capability, cpu_features, arch)
        casts = [*map(str, self.products), *(cast + OF_EXPERTS for cast in self.casts_of_experts)]
        recipes = {str(rule.recipe) for rule in self._in_fp8}
        mismatches = "; and ".join(self._match.mismatches(here, casts, recipes))
        if mismatches:
            raise PolicyError(f"policy {self.name!r} does not match: it needs {mismatches}")
        rules = (rule for rule in self.rules if rule.torch is None or holds(rule.torch, here.torch))
        return replace(
            self,
            rules=tuple(_in_formats_of(here, rule) for rule in rules),
            unchecked=tuple(self._match.unchecked(here)),
        )

    def rule_for(self, op: str) -> Rule | None:
        """Return the last rule that covers an op such as ``"aten::sum.dim_IntList"``, which decides; None without one.

        A name without overload means the default overload. Rules with conditions besides the op are ignored:
        see :meth:`ruling`. Resolve the policy first: rules for every version of torch count.
        """
        return self.ruling(op).rule

    def ruling(self, site: Site | str) -> Ruling:
        """Return the rule that decides a call, the rules that it overrides, and those whose conditions fail.

        ``site``: the call; or just the name of an op of the forward, if nothing else is known of the call.
        """
        return self._index.at(Site(site) if isinstance(site, str) else site)

    def plain_ruling(self, op: str, region: str = "forward") -> Ruling | None:
        """Return the ruling for an op if its name alone decides it, else None; cheap."""
        return self._index.plain(op, region)

    @cached_property
    def default_rule(self) -> Rule | None:
        """``unlisted`` as a rule; None if calls that no rule covers follow their inputs."""
        if self.unlisted == "follow":
            return None
        why = f"No rule covers it, and the policy says unlisted = {self.unlisted!r}."
        return CastRule(UNLISTED_ID, Category(self.unlisted), why=why, origin=self.origins.get("unlisted"))

    @cached_property
    def conditional(self) -> bool:
        """Whether a rule for the forward has conditions besides the op's name."""
        return any(rule.conditional and holds_in(rule.region, "forward") for rule in self.rules)

    @property
    def has_fp8(self) -> bool:
        """Whether a rule runs products in fp8, mxfp8 or nvfp4."""
        return bool(self.products)

    @cached_property
    def products(self) -> frozenset[Category]:
        """The casts of the rules that run products in fp8, mxfp8 or nvfp4."""
        return frozenset(rule.cast for rule in self._in_fp8)

    @cached_property
    def casts_of_experts(self) -> frozenset[str]:
        """The casts to 8 bits of rules that name products whose weight has a matrix for each expert."""
        return frozenset(str(rule.cast) for rule in self._in_fp8 if rule.of_experts)

    def has_rules_for(self, region: str) -> bool:
        """Say whether a rule is for a region: "forward", "backward", "kept", "loss" or "results"."""
        return region in self._regions

    @cached_property
    def digest(self) -> str:
        """The sha256 in hex of everything that decides a dtype, for cache keys; equal policies have equal digests."""
        rules = [rule.content() for rule in self.rules]
        match = [self.device, self.capability, self.cpu_features, self.torch, self.arch]
        scale = None if self.loss_scale is None else self.loss_scale.content()
        optimizer = None if self.optimizer is None else self.optimizer.content()
        content = [match, self.lower_precision_fp, self.outputs, self.unlisted, scale, optimizer, rules]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def _match(self) -> Match:
        return Match(self.device, self.capability, self.arch, self.cpu_features, self.torch)

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def _in_fp8(self) -> tuple[CastRule, ...]:
        return tuple(rule for rule in self.rules if isinstance(rule, CastRule) and rule.in_fp8)

    @cached_property
    def _regions(self) -> frozenset[str]:
        return frozenset(region for region in REGIONS for rule in self.rules if holds_in(rule.region, region))

    @cached_property
    def _index(self) -> RuleIndex:
        return RuleIndex(self.rules)


def _in_formats_of(machine: Machine, rule: Rule) -> Rule:
    return replace(rule, recipe=machine.recipe(rule.recipe)) if isinstance(rule, CastRule) and rule.recipe else rule
