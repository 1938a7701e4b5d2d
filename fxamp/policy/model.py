"""A policy as a value: which op runs in which floating dtype, on which device."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike

from fxamp.errors import PolicyError, nearest
from fxamp.policy.category import Category
from fxamp.policy.names import canonical, glob_covers, is_glob, spellings
from fxamp.policy.versions import holds, installed_torch_version

DEVICES = ("cuda", "cpu", "xpu", "mps", "mtia")
DTYPES = ("float16", "bfloat16")
OUTPUTS = ("captured", "keep")
PLACEMENTS = ("autocast", "min-cut")


@dataclass(frozen=True)
class Origin:
    """Where a rule was written."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Rule:
    """One decision of a policy: these ops get this cast.

    ``ops`` are canonical names: ``"aten::mm"`` covers every overload, ``"aten::mm.default"`` the default one,
    ``"aten::sum.dim_IntList"`` another one; globs are fnmatch's. ``torch`` is a version condition such as ``">=2.12"``.
    ``advice`` is what a banned op's error tells the user. ``why`` and ``origin`` explain, and do not count in equality.
    """

    id: str
    cast: Category
    ops: tuple[str, ...]
    why: str = field(default="", compare=False)
    torch: str | None = None
    advice: str = ""
    origin: Origin | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cast", Category(self.cast))
        object.__setattr__(self, "ops", tuple(canonical(op) for op in self.ops))


@dataclass(frozen=True)
class Ruling:
    """The rule that decides an op, None if it follows its inputs; ``lost``: those that cover it too, in their order."""

    rule: Rule | None
    lost: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class Policy:
    """Which dtype every op of a program runs in. Policies are equal if they decide the same, wherever they come from.

    ``device``: "cuda", "cpu", "xpu", "mps" or "mtia". ``lower_precision_fp``: "float16" or "bfloat16". ``outputs``:
    "captured" (a compiled graph's outputs keep the dtypes it was captured with) or "keep" (the dtypes the casts give).
    ``placement``: "autocast" or "min-cut". ``rules``: the last rule that covers an op decides; an op that no rule
    covers follows its inputs. ``sources``: the files it was read from.

    Raises PolicyError if a field has a value that is not accepted.
    """

    name: str = field(compare=False)
    device: str
    lower_precision_fp: str
    outputs: str = "captured"
    placement: str = "autocast"
    rules: tuple[Rule, ...] = ()
    sources: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for key, accepted in ACCEPTED_VALUES.items():
            given = getattr(self, key)
            if given not in accepted:
                raise PolicyError(f"policy {self.name!r}: {unknown_value(key, given, accepted)}")

    @staticmethod
    def load(name_or_path: "str | PathLike[str]") -> "Policy":
        """Read a built-in policy by its name ("cuda-float16") or a file by its path, which ends in ``.toml``.

        Raises PolicyError, listing every mistake with its file and line.
        """
        from fxamp.policy.load import load_policy

        return load_policy(name_or_path)

    def resolve(self, device: str | None = None, torch_version: str | None = None) -> "Policy":
        """Return the policy as it holds here: without the rules whose ``torch`` condition fails.

        ``device`` ("cuda", "cuda:1") is where the program runs; another device than the policy's raises PolicyError.
        ``torch_version`` is that of the installed torch unless given.
        """
        kind = None if device is None else device.partition(":")[0]
        if kind is not None and kind != self.device:
            raise PolicyError(
                f"policy {self.name!r} is for device {self.device!r}, but the program runs on {kind!r}; accepted: "
                f"a policy with [match] device = {kind!r}, such as '{kind}-{self.lower_precision_fp}'"
            )
        version = installed_torch_version() if torch_version is None else torch_version
        return replace(self, rules=tuple(r for r in self.rules if r.torch is None or holds(r.torch, version)))

    def rule_for(self, op: str) -> Rule | None:
        """Return the rule that decides an op such as ``"aten::sum.dim_IntList"``: the last one that covers it, or None.

        A name without overload is the default overload's. Resolve the policy first: all rules count, whatever torch
        version they are for.
        """
        return self.ruling(op).rule

    def ruling(self, op: str) -> Ruling:
        """Return the rule that decides an op, as :meth:`rule_for` does, and the rules that it overrides."""
        if op not in self._decided:
            self._decided[op] = self._rule_on(op)
        return self._decided[op]

    @cached_property
    def digest(self) -> str:
        """A sha256 in hex over all that decides, for cache keys; equal policies have equal digests."""
        rules = [[rule.id, rule.cast, rule.ops, rule.torch, rule.advice] for rule in self.rules]
        content = [self.device, self.lower_precision_fp, self.outputs, self.placement, rules]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def _rule_on(self, op: str) -> Ruling:
        positions = {at for name in spellings(op) for at in self._exact.get(name, ())}
        positions |= {at for pattern, at in self._globs if glob_covers(pattern, op)}
        *lost, rule = [None, *(self.rules[at] for at in sorted(positions))]
        return Ruling(rule, tuple(each for each in lost if each is not None))

    @cached_property
    def _exact(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for at, rule in enumerate(self.rules):
            for op in rule.ops:
                found.setdefault(op, []).append(at)
        return found

    @cached_property
    def _globs(self) -> tuple[tuple[str, int], ...]:
        return tuple((op, at) for at, rule in enumerate(self.rules) for op in rule.ops if is_glob(op))

    @cached_property
    def _decided(self) -> dict[str, Ruling]:
        return {}


ACCEPTED_VALUES = {
    "device": DEVICES,
    "lower_precision_fp": DTYPES,
    "outputs": OUTPUTS,
    "placement": PLACEMENTS,
}
"""The fields of a policy that are one of a few words."""


def unknown_value(key: str, given: object, accepted: tuple[str, ...]) -> str:
    """Return the words of the error for a value that is none of ``accepted``."""
    hint = nearest(given, accepted) if isinstance(given, str) else ""
    return f"{key} = {given!r} is unknown; accepted: {', '.join(map(repr, accepted))}{hint}"
