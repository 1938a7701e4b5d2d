"""Conditions as values: globs on modules and classes, comparisons of sizes, what is known of a tensor."""

from typing import Any

import pytest

from fxamp.policy import Category, Rule, Site, Symbol, TensorFacts
from fxamp.policy.model.comparisons import size_condition, size_meets
from fxamp.policy.model.module_globs import covers_class, covers_module
from fxamp.policy.model.site import product


@pytest.mark.parametrize(
    ("glob", "path", "covered"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("lm_head", "model.lm_head.proj", True),
        ("lm_head", "lm_heads", False),
        ("lm_head", "", False),
        ("head", "lm_head", False),
        (".lm_head", "model.lm_head", False),
        (".lm_head", "lm_head.proj", True),
        ("layers.*.router", "layers.3.router", True),
        ("layers.*.router", "layers.3.mlp.router", False),
        ("layers.**.router", "layers.3.mlp.router.proj", True),
        ("layers.**.router", "layers.router", True),
        ("layers.[0-3].norm*", "net.layers.2.norm_1", True),
        ("layers.[0-3].norm*", "net.layers.12.norm_1", False),
        ("layers.?", "layers.12", False),
        ("**", "", True),
        ("*", "", False),
        ("*", "a", True),
        ("*.*", "a", False),
        ("Layer", "layer", False),
    ],
)
def test_module_globs(glob: str, path: str, covered: bool) -> None:
    assert covers_module(glob, path) is covered


@pytest.mark.parametrize(
    ("glob", "covered"), [("Linear", True), ("torch.nn.*", True), ("*Linear", True), ("linear", False), ("Lin", False)]
)
def test_class_globs(glob: str, covered: bool) -> None:
    assert covers_class(glob, "torch.nn.modules.linear.Linear") is covered


@pytest.mark.parametrize(
    ("condition", "met"),
    [(64, [64]), (">64", [65, 66]), (" >= 64 , <66 ", [64, 65]), ("!=65", [63, 64, 66]), ("<=64", [63, 64])],
)
def test_sizes(condition: int | str, met: list[int]) -> None:
    written = size_condition(condition)
    assert [size for size in (63, 64, 65, 66) if size_meets(written, size)] == met
    assert size_condition(written) == written


KNOWN = TensorFacts("float32", (2, 3, Symbol("s0")))


@pytest.mark.parametrize(
    ("condition", "mismatch", "unknown"),
    [
        ({"rank": 3}, None, False),
        ({"rank": ">3"}, "the rank of x is 3, not >3", False),
        ({"rank": "%3"}, None, False),
        ({"shape": ["%2", "%3", "*"]}, None, False),
        ({"shape": ["%2,>2", "..."]}, "size 0 of x is 2, not %2,>2", False),
        ({"shape": ["%16", "..."]}, "size 0 of x is 2, not %16", False),
        ({"shape": ["...", "%16"]}, "size 2 of x is not known (s0)", True),
        ({"size": ">=0"}, "the size of x is not known (s0)", True),
        ({"shape": [2, "*", "*"]}, None, False),
        ({"shape": [2, "..."]}, None, False),
        ({"shape": ["...", 3, "*"]}, None, False),
        ({"shape": ["...", ">1"]}, "size 2 of x is not known (s0)", True),
        ({"shape": [3, "..."]}, "size 0 of x is 2, not ==3", False),
        ({"shape": [2, 3]}, "the shape of x has 3 dimensions, which does not fit [==2, ==3]", False),
        ({"shape": [2, "...", 3, 4, 5]}, "the shape of x has 3 dimensions", False),
        ({"dtype": "float16"}, "x is float32, not float16", False),
        ({"dtype": ["float16", "float32"]}, None, False),
        (3, "x is a tensor, not 3", False),
    ],
)
def test_what_is_known_of_a_tensor(condition: Any, mismatch: str | None, unknown: bool) -> None:
    failure = Rule("r", Category.FP32, ("mm",), args={"x": condition}).mismatch(Site("aten::mm", args={"x": KNOWN}))
    assert (failure is None) == (mismatch is None)
    assert failure is None or (failure.why.startswith(mismatch or "-") and failure.unknown is unknown)


@pytest.mark.parametrize(
    ("condition", "value", "same"),
    [
        (-1, -1, True),
        (-1, (-1,), True),
        (-1, (-1, 0), False),
        ([0, 1], (0, 1), True),
        ([0, 1], (1, 0), False),
        (1, True, False),
        (True, 1, False),
        (0.5, 0.5, True),
        (1, 1.0, True),
        ("none", "none", True),
        ("none", None, False),
        (0, None, False),
    ],
)
def test_values(condition: Any, value: Any, same: bool) -> None:
    rule = Rule("r", Category.FP32, ("mm",), args={"x": condition})
    assert (rule.mismatch(Site("aten::mm", args={"x": value})) is None) is same


def test_a_symbolic_number_meets_no_value() -> None:
    rule = Rule("r", Category.FP32, ("mm",), args={"x": 3})
    failure = rule.mismatch(Site("aten::mm", args={"x": Symbol("s1")}))
    assert failure is not None and failure.unknown and failure.why == "the value of x is not known (s1)"


def test_products_of_sizes() -> None:
    assert product((2, 3, 4)) == 24 and product(()) == 1
    assert product((2, Symbol("a"), Symbol("b"))) == Symbol("a*b")
    assert TensorFacts(shape=()).size == 1 and TensorFacts(size=9).rank is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"region": "behind"}, "region = 'behind' is unknown"),
        ({"inputs": {"x": "float32"}}, "x = 'float32' is unknown"),
        ({"cast": "promote", "inputs": {"x": "fp32"}}, "inputs goes with cast"),
        ({"cast": "banned", "region": "both"}, "region = 'both' goes with cast"),
        ({"modules": ("a b",)}, "'a b' is not a module path"),
        ({"args": {"x": {}}}, "is not a condition on an argument"),
        ({"reduces": "many"}, "'many' is not a size"),
        ({"reduces": "%0"}, "'%0' is not a size"),
        ({"recipe": "rowwise"}, "recipe goes with cast = 'fp8' or 'mxfp8' or 'nvfp4', but this rule has"),
        ({"cast": "fp8"}, "cast = 'fp8' needs a recipe; accepted: 'tensorwise', 'rowwise', 'rowwise_with_gw_hp'"),
        ({"cast": "fp8", "recipe": "rowise"}, "recipe = 'rowise' is unknown; .*did you mean 'rowwise'"),
        ({"cast": "fp8", "recipe": "MX-FP8"}, "recipe = 'MX-FP8': MXFP8, .* is cast = 'mxfp8'; accepted: 'tensorwise'"),
        ({"cast": "fp8", "recipe": "nvfp4"}, "recipe = 'nvfp4': NVFP4, .* is cast = 'nvfp4'; accepted: 'tensorwise'"),
        ({"cast": "fp8", "recipe": "rowwise", "ops": ("exp",)}, "cast = 'fp8' is for the ops linear, .*'aten::exp'"),
        (
            {"cast": "fp8", "recipe": "tensorwise", "ops": ("bmm",)},
            "not for 'bmm'; accepted: 'rowwise', 'rowwise_fnuz'$",
        ),
        ({"cast": "nvfp4", "recipe": "nearest", "ops": ("_grouped_mm",)}, "accepted: a rule with cast = 'fp8' or"),
        ({"cast": "fp8", "recipe": "rowwise", "ops": ()}, "cast = 'fp8' is for the ops .* names no ops"),
        ({"cast": "fp8", "recipe": "rowwise", "region": "both"}, "region = 'both' goes with cast"),
        ({"cast": "fp8", "recipe": "rowwise", "inputs": {"x": "fp32"}}, "inputs goes with cast"),
    ],
)
def test_a_rule_in_python_is_checked_too(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rule(**{"id": "r", "cast": "fp32", "ops": ("mm",), **arguments})
