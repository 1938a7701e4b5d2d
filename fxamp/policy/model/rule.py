"""One rule of a policy: the calls it covers, and the cast they get, or how their results are kept."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fxamp.argument_names import named_arguments
from fxamp.errors import nearest
from fxamp.policy.model.category import Category
from fxamp.policy.model.chunks import LOSS, Chunks, chunk_problems, chunks_of
from fxamp.policy.model.comparisons import size_condition
from fxamp.policy.model.conditions import ArgCondition, Objection, number_objection
from fxamp.policy.model.keep import BLOCK, EIGHT_BITS, KEPT, Keep, keep_problems
from fxamp.policy.model.module_globs import covers_class, covers_module, module_glob
from fxamp.policy.model.op_names import canonical, covers
from fxamp.policy.model.recipe import RECIPES, RECIPES_OF, Recipe
from fxamp.policy.model.results import RESULTS, result_problems
from fxamp.policy.model.settings import unknown_value
from fxamp.policy.model.site import Site

RULE_REGIONS = ("forward", "backward", "both", KEPT, LOSS, RESULTS)
INPUT_DTYPES = ("lower_precision_fp", "fp32", "follow")
EXPERTS = ("aten::_grouped_mm", "aten::bmm", "aten::baddbmm", "transformers::grouped_mm_fallback")
"""The products whose weight has a matrix for each expert; those of ``matmul`` may."""

PRODUCTS = ("aten::linear", "aten::mm", "aten::addmm", "aten::matmul", *EXPERTS)
"""The ops that rules with a cast of :data:`RECIPES_OF` may name."""

ONE_DTYPE = (Category.LOWER_PRECISION_FP, Category.FP32)
"""The categories that name one dtype for every input: only these allow ``inputs`` and the backward."""


@dataclass(frozen=True)
class Origin:
    """A line of a policy file; without a line, another place."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@named_arguments
@dataclass(frozen=True)
class Rule:
    """One decision of a policy: the calls that meet all of its conditions get this cast.

    ``ops`` are canonical names: ``"aten::mm"`` covers every overload, ``"aten::mm.default"`` the default one,
    ``"aten::sum.dim_IntList"`` another one; globs are fnmatch's; without ``ops`` every op that computes is covered.
    ``modules`` are globs on dotted module paths, ``module_classes`` on class names. ``args`` are conditions by argument
    name, ``reduces`` one on the number of elements that go into one result of a reduction. ``region``: "forward",
    "backward", "both", "kept", "loss" or "results". ``torch`` is a version condition such as ``">=2.12"``. ``inputs``
    overrides ``cast`` for single arguments: "lower_precision_fp", "fp32" or "follow".

    A rule of region "kept" has no cast. ``keep`` says how the calls' results are stored for the backward; ``block``
    elements share a scale, 0 without scales. ``elements`` is a condition on the size of the result. At least one of
    the ops in ``read_by`` must read it in the forward.

    A rule of region "loss" has no cast either. ``chunks``: how many rows of logits exist at a time, or "auto";
    ``gradients``: whether the forward or the backward makes the gradients of a chunk. A rule with ``chunks`` is of that
    region without saying so; ``elements`` is a condition on the number of logits.

    Nor has a rule of region "results", which says ``drop``: a graph that returns a loss does not make the results that
    meet the conditions, for nobody reads them.

    ``recipe`` is how ``cast = "fp8"``, ``"mxfp8"`` and ``"nvfp4"`` scale, one of :data:`RECIPES_OF`. ``advice`` is the
    hint in a banned op's error.
    ``why`` and ``origin`` explain the rule and do not count in equality.

    ``args`` and ``inputs`` may be given as mappings. Raises ValueError for values that a policy file could not hold.
    """

    id: str
    cast: Category | None = None
    ops: tuple[str, ...] = ()
    why: str = field(default="", compare=False)
    torch: str | None = None
    advice: str = ""
    origin: Origin | None = field(default=None, compare=False)
    modules: tuple[str, ...] = ()
    module_classes: tuple[str, ...] = ()
    args: "tuple[tuple[str, ArgCondition], ...] | Mapping[str, object]" = ()
    reduces: str = ""
    region: str = "forward"
    inputs: "tuple[tuple[str, str], ...] | Mapping[str, str]" = ()
    keep: Keep | None = None
    block: int = 0
    elements: str = ""
    read_by: tuple[str, ...] = ()
    recipe: str = ""
    chunks: Chunks | None = None
    gradients: str = ""
    drop: bool = False

    def __post_init__(self) -> None:
        args = {name: ArgCondition.of(condition) for name, condition in dict(self.args).items()}
        tidy = {
            "cast": None if self.cast is None else Category(self.cast),
            "keep": None if self.keep is None else Keep(self.keep),
            "elements": size_condition(self.elements) if self.elements else "",
            "read_by": tuple(canonical(op) for op in self.read_by),
            "ops": tuple(canonical(op) for op in self.ops),
            "modules": tuple(module_glob(glob) for glob in self.modules),
            "module_classes": tuple(self.module_classes),
            "args": tuple(sorted(args.items(), key=lambda item: item[0])),
            "reduces": size_condition(self.reduces) if self.reduces else "",
            "inputs": tuple(sorted(dict(self.inputs).items())),
            "chunks": None if self.chunks is None else chunks_of(self.chunks),
            "region": implied_region(self.region, self.chunks, self.drop),
        }
        for name, value in tidy.items():
            object.__setattr__(self, name, value)
        if self.region not in RULE_REGIONS:
            raise ValueError(
                f"rule {self.id!r}: region = {self.region!r} is unknown; accepted: {', '.join(RULE_REGIONS)}"
            )
        if getattr(self, needed_key(self.region)) in (None, False):
            raise ValueError(f"rule {self.id!r}: region = {self.region!r} goes with {needed_key(self.region)}")
        for _, problem in problems(self.cast, self.region, dict(self.inputs), self.recipe, self.ops):
            raise ValueError(f"rule {self.id!r}: {problem}")
        for _, problem in problems_of_regions(self.content()):
            raise ValueError(f"rule {self.id!r}: {problem}")
        if self.keep in EIGHT_BITS and not self.block:
            object.__setattr__(self, "block", BLOCK)

    @property
    def asks(self) -> str:
        """What the rule requests: its cast, with its recipe, its keep, or its chunks."""
        if self.chunks is not None:
            return f"chunks of {self.chunks}"
        if self.drop:
            return "drop"
        return f"{self.cast} {self.recipe}" if self.recipe else str(self.keep or self.cast)

    @property
    def in_fp8(self) -> bool:
        """Whether the products that the rule covers run in fp8, mxfp8 or nvfp4."""
        return self.cast in RECIPES_OF

    @property
    def of_experts(self) -> bool:
        """Whether the rule names products whose weight has a matrix for each expert."""
        return any(op.partition(".")[0] in EXPERTS for op in self.ops)

    @property
    def conditional(self) -> bool:
        """Whether the rule has conditions besides the op's name."""
        others = (self.modules, self.module_classes, self.args, self.reduces, self.elements, self.read_by)
        return not self.ops or any(map(bool, others))

    def covers_op(self, op: str, region: str = "forward") -> bool:
        """Whether the rule is for this op and region; its other conditions are not checked."""
        return holds_in(self.region, region) and (not self.ops or any(covers(name, op) for name in self.ops))

    def objection(self, site: Site) -> Objection | None:
        """Return the first condition that fails for ``site``, or None if the rule covers the call."""
        if not self.covers_op(site.op, site.region):
            return Objection(f"it is not for {site.op} in the {site.region}")
        return next((objection for objection in self._objections(site) if objection is not None), None)

    def _objections(self, site: Site) -> Iterable[Objection | None]:
        if not self.ops and not site.computes:
            yield Objection("it names no ops, and this call only moves or views values, or names its dtype itself")
        if site.partial and not site.module and (self.modules or (self.module_classes and not site.module_classes)):
            yield Objection("the module is not known", unknown=True)
        if self.modules and not any(covers_module(glob, site.module) for glob in self.modules):
            yield Objection(f"module {site.module!r} is not covered by {' or '.join(self.modules)}")
        if self.module_classes and not any(
            covers_class(g, c) for g in self.module_classes for c in site.module_classes
        ):
            yield Objection(f"no module around it is of a class {' or '.join(self.module_classes)}")
        for name, condition in dict(self.args).items():
            yield ArgCondition.of(condition).objection(name, site)
        if self.reduces:
            yield number_objection("the number of elements reduced to one", site.reduces, self.reduces)
        if self.elements:
            yield number_objection("the number of its elements", site.elements, self.elements)
        if self.read_by and not any(covers(name, op) for name in self.read_by for op in site.readers):
            reason = f"none of {', '.join(self.read_by)} is known to read it"
            yield Objection(reason, unknown=site.partial and not site.readers)

    def content(self) -> dict[str, object]:
        """Return the rule under the keys of a policy file, without ``why`` and without keys that have no value."""
        keys: dict[str, object] = {
            "id": self.id,
            "cast": self.cast and self.cast.value,
            "recipe": str(self.recipe),
            "keep": self.keep and self.keep.value,
            "block": self.block,
            "chunks": self.chunks,
            "gradients": self.gradients,
            "drop": self.drop,
            "ops": list(self.ops),
            "modules": list(self.modules),
            "module_classes": list(self.module_classes),
            "reduces": self.reduces,
            "elements": self.elements,
            "read_by": list(self.read_by),
            "region": "" if self.region in ("forward", LOSS, RESULTS) else self.region,
            "torch": self.torch,
            "advice": self.advice,
            "args": {name: ArgCondition.of(condition).content() for name, condition in dict(self.args).items()},
            "inputs": dict(self.inputs),
        }
        return {key: value for key, value in keys.items() if value}


def holds_in(rule_region: str, region: str) -> bool:
    """Whether a rule of ``rule_region`` holds in ``region``; "both" is the forward and the backward."""
    return rule_region == region or (rule_region == "both" and region in ("forward", "backward"))


def needed_key(region: str) -> str:
    """The key that a rule of ``region`` must have."""
    return {KEPT: "keep", LOSS: "chunks", RESULTS: "drop"}.get(region, "cast")


def implied_region(region: str, chunks: object, drop: object) -> str:
    """Return the region of a rule: one with ``chunks`` or ``drop`` need not name it."""
    if region != "forward":
        return region
    return LOSS if chunks is not None else RESULTS if drop else region


def problems_of_regions(rule: dict[str, object]) -> list[tuple[tuple[str, ...], str]]:
    """Return ``(key, message)`` for keys that do not fit the rule's region; ``rule`` has the keys that are set."""
    return [*keep_problems(rule), *chunk_problems(rule), *result_problems(rule)]


def problems(
    cast: Category | None, region: str, inputs: Mapping[str, object], recipe: str, ops: tuple[str, ...]
) -> list[tuple[tuple[str, ...], str]]:
    """Return ``(key, message)`` for every mistake in a rule's keys taken together; ``ops`` are canonical."""
    mistakes: list[tuple[tuple[str, ...], str]] = list(_fp8_problems(cast, recipe, ops))
    for name, dtype in inputs.items():
        if dtype not in INPUT_DTYPES:
            hint = nearest(str(dtype), INPUT_DTYPES)
            accepted = ", ".join(map(repr, INPUT_DTYPES))
            mistakes.append((("inputs", name), f"{name} = {dtype!r} is unknown; accepted: {accepted}{hint}"))
    if cast is None or cast in ONE_DTYPE:
        return mistakes
    accepted = " or ".join(repr(category.value) for category in ONE_DTYPE)
    if inputs:
        mistakes.append((("inputs",), f"inputs goes with cast = {accepted}, but this rule has cast = {cast.value!r}"))
    if region != "forward":
        message = f"region = {region!r} goes with cast = {accepted}, but this rule has cast = {cast.value!r}"
        mistakes.append((("region",), message))
    return mistakes


def _fp8_problems(cast: Category | None, recipe: str, ops: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], str]]:
    accepted = () if cast is None else tuple(map(str, RECIPES_OF.get(cast, ())))
    if cast is None or not accepted:
        if cast is not None and recipe:
            casts = " or ".join(repr(category.value) for category in RECIPES_OF)
            yield ("recipe",), f"recipe goes with cast = {casts}, but this rule has cast = {cast.value!r}"
        return
    packets = [op.partition(".")[0] for op in ops]
    others = [op for op, packet in zip(ops, packets, strict=True) if packet not in PRODUCTS]
    if others or not ops:
        named = ", ".join(op.removeprefix("aten::") for op in PRODUCTS)
        fault = f"not for {others[0]!r}" if others else "but this rule names no ops"
        yield ("ops",), f"cast = {cast.value!r} is for the ops {named}, {fault}"
    if not recipe:
        yield ("recipe",), f"cast = {cast.value!r} needs a recipe; accepted: {', '.join(map(repr, accepted))}"
    elif recipe not in accepted:
        yield ("recipe",), unknown_value("recipe", recipe, accepted)
    elif (experts := next(filter(EXPERTS.__contains__, packets), "")) and not RECIPES[Recipe(recipe)].grouped:
        named = ", ".join(repr(name) for name in accepted if RECIPES[Recipe(name)].grouped)
        named = named or "a rule with cast = 'fp8' or 'mxfp8'"
        yield ("recipe",), f"recipe = {recipe!r} is not for {experts.removeprefix('aten::')!r}; accepted: {named}"
