"""The base of all kinds of rules: an id, the conditions on a call, and where the rule is written."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar

from fxamp.policy.model.comparisons import version_condition
from fxamp.policy.model.conditions import ArgCondition, Mismatch
from fxamp.policy.model.keys import ARGUMENTS, STRING, STRINGS, VERSIONS, Condition, Key, declared, size
from fxamp.policy.model.module_globs import class_glob, covers_class, covers_module, module_glob
from fxamp.policy.model.op_names import canonical, covers
from fxamp.policy.model.site import Site

_REGIONS = ("forward", "backward", "both", "kept", "loss", "results")

Mistake = tuple[tuple[str, ...], str]
"""The path of the key with the mistake, empty for the whole rule, and a message."""


@dataclass(frozen=True)
class Origin:
    """A line of a policy file; without a line, another place."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


def _module_mismatch(globs: tuple[str, ...], site: Site) -> Mismatch | None:
    if site.partial and not site.module:
        return Mismatch("the module is not known", unknown=True)
    if any(covers_module(glob, site.module) for glob in globs):
        return None
    return Mismatch(f"module {site.module!r} is not covered by {' or '.join(globs)}")


def _class_mismatch(globs: tuple[str, ...], site: Site) -> Mismatch | None:
    if site.partial and not site.module and not site.module_classes:
        return Mismatch("the module is not known", unknown=True)
    if any(covers_class(glob, name) for glob in globs for name in site.module_classes):
        return None
    return Mismatch(f"no module around it is of a class {' or '.join(globs)}")


def _args_mismatch(args: tuple[tuple[str, ArgCondition], ...], site: Site) -> Mismatch | None:
    mismatches = (condition.mismatch(name, site) for name, condition in args)
    return next((mismatch for mismatch in mismatches if mismatch is not None), None)


ID = declared(Key(STRING, "A word that names the rule; a later file's rule of the same id takes its place."))
OPS = declared(Condition(STRINGS, "Op names: mm, aten::sum.dim_IntList, mylib::op, conv*.", parse=canonical), ())
ELEMENTS = size(
    "elements",
    "The number of elements of the saved value, the logits or the result: '>=4096'.",
    "the number of its elements",
    "of {} elements",
)


class _Positional:
    """The positional fields, which each kind declares itself, by ``ID`` and ``OPS``, around its main key."""

    id: str
    ops: tuple[str, ...]
    _conditions: tuple[str, ...]  # the keys of the conditions that are set, except ``ops``


@dataclass(frozen=True, kw_only=True, init=False)
class Rule(_Positional):
    """One rule of a policy; it applies to the calls that meet all of its conditions.

    ``Rule(...)`` makes a rule of the kind that its keys call for: with ``cast``, ``keep``, ``chunks`` or ``drop``.

    ``ops`` are canonical names: ``"aten::mm"`` covers every overload, ``"aten::mm.default"`` the default one,
    ``"aten::sum.dim_IntList"`` another one; globs are fnmatch's; without ``ops`` every op that computes is covered.
    ``modules`` are globs on dotted module paths, ``module_classes`` on class names. ``args`` are conditions by argument
    name; a mapping is accepted. ``region``: what the rule is for, by default the first of the kind's regions.
    ``torch`` is a version condition such as ``">=2.12"``. ``why`` and ``origin`` explain the rule and do not count in
    equality.

    Raises ValueError for values that a policy file could not hold.
    """

    main_key: ClassVar[str]
    """The key that every rule of this kind has, and no other."""
    regions: ClassVar[Mapping[str, str]]
    """The regions of this kind; for each, in words, what happens to a call that no rule covers."""

    modules: tuple[str, ...] = declared(
        Condition(
            STRINGS,
            "Globs on module paths: lm_head, layers.*.router.",
            parse=module_glob,
            mismatch=_module_mismatch,
            words=lambda globs: iter([f"in {' or '.join(globs)}"]),
        ),
        default=(),
    )
    module_classes: tuple[str, ...] = declared(
        Condition(
            STRINGS,
            "Globs on class names: *RMSNorm.",
            parse=class_glob,
            mismatch=_class_mismatch,
            words=lambda globs: iter([f"in a {' or '.join(globs)}"]),
        ),
        default=(),
    )
    args: tuple[tuple[str, ArgCondition], ...] = declared(
        Condition(
            ARGUMENTS,
            "Conditions on arguments by name: a value, or dtype, rank, size and shape of a tensor.",
            parse=ArgCondition.of,
            mismatch=_args_mismatch,
            words=lambda args: (f"{name} {condition.words()}" for name, condition in args),
        ),
        default=(),
    )
    region: str = declared(
        Key(
            STRING,
            "What it is for: ops of the forward, the backward, or both; tensors saved between them; a loss; results.",
            _REGIONS,
        ),
        default="",
    )
    torch: str | None = declared(Key(VERSIONS, "Versions of torch: '>=2.12'.", parse=version_condition), default=None)
    why: str = declared(Key(STRING, "A sentence that is shown where the rule decides."), default="", compare=False)
    origin: Origin | None = field(default=None, compare=False)

    def __new__(cls, *args: Any, **keys: Any) -> "Rule":
        return object.__new__(kind_of(keys) if cls is Rule else cls)

    def __post_init__(self) -> None:
        try:
            for field in fields(self):
                if "key" in field.metadata and (value := getattr(self, field.name)) != field.default:
                    value = field.metadata["key"].canonical(field.name, value)
                    object.__setattr__(self, field.name, value)
        except ValueError as error:
            raise ValueError(f"rule {self.id!r}: {error}") from None
        given = {name: value for name in keys_of(type(self)) if (value := getattr(self, name))}
        if self.main_key not in given:
            raise ValueError(f"rule {self.id!r}: it has no {self.main_key}; a rule has one of {', '.join(kinds())}")
        for _, problem in mistakes(type(self), given):
            raise ValueError(f"rule {self.id!r}: {problem}")
        if not self.region:
            object.__setattr__(self, "region", next(iter(self.regions)))
        keys = keys_of(type(self))
        conditions = (name for name in given if name != "ops" and isinstance(keys[name], Condition))
        object.__setattr__(self, "_conditions", tuple(conditions))

    @property
    def asks(self) -> str:
        """The action of the rule in words."""
        return str(getattr(self, self.main_key))

    @property
    def settings(self) -> dict[str, Any]:
        """The keys that say what the rule does, with values: rules of one kind with equal settings do the same."""
        keys = keys_of(type(self)).items()
        names = [name for name, key in keys if not isinstance(key, Condition) and name not in _COMMON]
        return {name: getattr(self, name) for name in names}

    @property
    def conditional(self) -> bool:
        """Whether the rule has conditions besides the op's name."""
        return not self.ops or bool(self._conditions)

    @property
    def in_fp8(self) -> bool:
        """Whether the products that the rule covers run in fp8, mxfp8 or nvfp4."""
        return False

    def conditions(self) -> list[tuple[str, Condition, Any]]:
        """Return the conditions besides the op's name: name, key and value of each."""
        keys = keys_of(type(self))
        named = ((name, keys[name]) for name in self._conditions)
        return [(name, key, getattr(self, name)) for name, key in named if isinstance(key, Condition)]

    def covers_op(self, op: str, region: str = "forward") -> bool:
        """Whether the rule is for this op and region; its other conditions are not checked."""
        return holds_in(self.region, region) and (not self.ops or any(covers(name, op) for name in self.ops))

    def mismatch(self, site: Site) -> Mismatch | None:
        """Return the first condition that fails for ``site``, or None if the rule covers the call."""
        if not self.covers_op(site.op, site.region):
            return Mismatch(f"it is not for {site.op} in the {site.region}")
        if not self.ops and not site.computes:
            return Mismatch("it names no ops, and this call only moves or views values, or names its dtype itself")
        mismatches = (condition.mismatch(value, site) for _, condition, value in self.conditions())
        return next((mismatch for mismatch in mismatches if mismatch is not None), None)

    def content(self) -> dict[str, object]:
        """Return the rule under the keys of a policy file, without ``why`` and without keys that have no value."""
        keys = {name: key for name, key in keys_of(type(self)).items() if name != "why"}
        content = {name: key.written(value) for name, key in keys.items() if (value := getattr(self, name))}
        if self.region == next(iter(self.regions)):
            del content["region"]
        return content

    @classmethod
    def _mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        """Yield the mistakes in the combination of the kind's own keys; ``given`` as in :func:`mistakes`."""
        return iter(())


_COMMON = ("id", "region", "torch", "why")
"""The keys of all rules that are not conditions on a call."""


def keys_of(kind: type[Rule]) -> Mapping[str, Key]:
    """Return the keys of a kind: its own settings, its conditions, then the others; tables are last, as in TOML."""
    hashable: Any = kind
    return _keys(hashable)


@cache
def _keys(kind: type[Rule]) -> Mapping[str, Key]:
    keys: dict[str, Key] = {field.name: field.metadata["key"] for field in fields(kind) if "key" in field.metadata}

    def place(name: str) -> tuple[bool, ...]:
        conditional = isinstance(keys[name], Condition)
        return dict in keys[name].kind.types, name in _COMMON[1:], conditional, conditional and name != "ops"

    return {name: keys[name] for name in sorted(keys, key=place)}


def kinds() -> dict[str, type[Rule]]:
    """Return the kinds of rules by the key that makes them."""
    return {kind.main_key: kind for kind in Rule.__subclasses__()}


def kind_of(table: Mapping[str, Any]) -> type[Rule]:
    """Return the kind of a rule with these keys: by the first main key among them, else by the region."""
    found = next((kinds()[key] for key in table if key in kinds()), None)
    region = table.get("region", "")
    return found or next((kind for kind in kinds().values() if region in [*kind.regions]), kinds()["cast"])


def mistakes(kind: type[Rule], given: Mapping[str, Any]) -> Iterator[Mistake]:
    """Yield the mistakes in the combination of a rule's keys; ``given`` holds the keys with an accepted value."""
    main, region = kind.main_key, given.get("region", "")
    for name in [name for name in given if name not in keys_of(kind)]:
        if name in kinds():
            yield (name,), f"{name} does not go with {main}; accepted: one of {', '.join(kinds())}"
        else:
            owners = " or ".join(other for other in kinds() if name in keys_of(kinds()[other]))
            yield (name,), f"{name} goes with {owners}, not with {main}"
    if region and region not in kind.regions:
        accepted = ", ".join(map(repr, kind.regions))
        yield ("region",), f"region = {region!r} does not go with {main}; accepted: {accepted}, or no region"
    yield from kind._mistakes(given)


def holds_in(rule_region: str, region: str) -> bool:
    """Whether a rule of ``rule_region`` holds in ``region``; "both" is the forward and the backward."""
    return rule_region == region or (rule_region == "both" and region in ("forward", "backward"))


def uncovered(region: str) -> str:
    """Return what happens in ``region`` to a call that no rule covers."""
    return next(kind.regions[region] for kind in kinds().values() if region in kind.regions)
