"""Rules with ``cast``: the dtype in which ops of the forward or the backward run."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fxamp.argument_names import named_arguments
from fxamp.policy.model.category import Category
from fxamp.policy.model.keys import STRING, Key, Kind, declared, enum, size
from fxamp.policy.model.recipe import RECIPES, RECIPES_OF, Recipe
from fxamp.policy.model.rule import ID, OPS, Mistake, Rule
from fxamp.policy.model.settings import unknown_value

INPUT_DTYPES = ("lower_precision_fp", "fp32", "follow")
EXPERTS = ("aten::_grouped_mm", "aten::bmm", "aten::baddbmm", "transformers::grouped_mm_fallback")
"""The products whose weight has a matrix for each expert; the weight of ``matmul`` may have one, too."""

PRODUCTS = ("aten::linear", "aten::mm", "aten::addmm", "aten::matmul", *EXPERTS)
"""The ops that rules with a cast in :data:`RECIPES_OF` may name."""

ONE_DTYPE = (Category.LOWER_PRECISION_FP, Category.FP32)
"""The categories with one dtype for every input. Only they allow ``inputs``, and rules for the backward."""

_DTYPES_BY_NAME = Kind("a table", (dict,), {"type": "object", "additionalProperties": enum(INPUT_DTYPES)})


@named_arguments
@dataclass(frozen=True)
class CastRule(Rule):
    """The calls that meet all conditions get this cast.

    ``recipe`` says how ``cast = "fp8"``, ``"mxfp8"`` or ``"nvfp4"`` scales, one of :data:`RECIPES_OF`. ``reduces`` is a
    condition on the number of elements that a reduction combines into one result. ``inputs`` overrides ``cast`` for
    single arguments: "lower_precision_fp", "fp32" or "follow"; a mapping is accepted. ``advice`` is the hint in the
    error of a banned op. ``region``: "forward", "backward", or "both".
    """

    main_key = "cast"
    regions: ClassVar[Mapping[str, str]] = {
        "forward": "it follows its inputs",
        "backward": "it runs in the dtypes that follow from its forward",
        "both": "it follows its inputs",
    }

    id: str = ID
    cast: Category = declared(
        Key(STRING, "What happens to the floating-point inputs.", tuple(map(str, Category)), Category), default=None
    )
    ops: tuple[str, ...] = OPS
    recipe: str = declared(Key(STRING, "How cast = 'fp8', 'mxfp8' or 'nvfp4' scales.", tuple(map(str, Recipe))), "")
    advice: str = declared(Key(STRING, "What the error of a banned op tells the user."), "")
    inputs: tuple[tuple[str, str], ...] = declared(
        Key(_DTYPES_BY_NAME, "Dtypes of single arguments that cast does not apply to."), default=()
    )
    reduces: str = size(
        "reduces",
        "How many elements go into one result of a reduction: '>4096'.",
        "the number of elements reduced to one",
        "reduces {}",
    )

    @property
    def asks(self) -> str:
        """The cast, with its recipe."""
        return f"{self.cast} {self.recipe}" if self.recipe else str(self.cast)

    @property
    def in_fp8(self) -> bool:
        """Whether the products that the rule covers run in fp8, mxfp8 or nvfp4."""
        return self.cast in RECIPES_OF

    @property
    def of_experts(self) -> bool:
        """Whether the rule names products whose weight has a matrix for each expert."""
        return any(op.partition(".")[0] in EXPERTS for op in self.ops)

    @classmethod
    def _mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        for name, dtype in dict(given.get("inputs", ())).items():
            if dtype not in INPUT_DTYPES:
                yield ("inputs", name), unknown_value(name, dtype, INPUT_DTYPES)
        if "cast" not in given:
            return
        cast = Category(given["cast"])
        yield from _recipe_mistakes(cast, given.get("recipe", ""), given.get("ops", ()))
        if cast not in ONE_DTYPE:
            has = f"goes with cast = {_named(ONE_DTYPE)}, but this rule has cast = {cast.value!r}"
            if given.get("inputs"):
                yield ("inputs",), f"inputs {has}"
            if given.get("region", "forward") != "forward":
                yield ("region",), f"region = {given['region']!r} {has}"
        if cast is Category.BANNED and not given.get("advice"):
            yield (), "cast = 'banned' needs advice: what the user should do instead"
        if given.get("advice") and cast is not Category.BANNED:
            yield ("advice",), f"advice goes with cast = 'banned', but this rule has cast = {cast.value!r}"


def _named(categories: Iterable[Category]) -> str:
    return " or ".join(repr(category.value) for category in categories)


def _recipe_mistakes(cast: Category, recipe: str, ops: tuple[str, ...]) -> Iterator[Mistake]:
    accepted = tuple(map(str, RECIPES_OF.get(cast, ())))
    if not accepted:
        if recipe:
            yield ("recipe",), f"recipe goes with cast = {_named(RECIPES_OF)}, but this rule has cast = {cast.value!r}"
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
