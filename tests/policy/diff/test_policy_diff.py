"""The difference of two policies: exact against all calls of a small world, symmetric, and blind to mere writing."""

import itertools
import random
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxamp.policy import Category, LossScale, Policy, Rule, Site, TensorFacts, built_in_names
from fxamp.policy.diff.glob_overlap import common_name
from fxamp.policy.diff.op_changes import OpChange
from fxamp.policy.diff.policy_diff import PolicyDiff, diff_policies
from fxamp.policy.diff.rule_overlap import exclusive, implied

#: Each glob, each two of them, each name with and without overload, and the rest: all have an op of their own here.
NAMED = ("mm", "mm.default", "sum", "sum.dim", "conv*", "*1d", "m*")
OPS = (
    *("mm.default", "mm.out", "sum.default", "sum.dim", "conv1d.default", "conv2d.out", "max1d.default"),
    *("mul.default", "pad1d.default", "relu.default"),
)
MODULES = ((), ("a",), ("b",), ("a", "b"))
VALUES = ((), (("dim", 0),), (("dim", 1),), (("dim", 0), ("keep", True)), (("dim", (1,)),))
REDUCES = ("", ">4", ">50")

SITES = [
    Site(f"aten::{op}", module, (), {"dim": dim, "keep": keep}, region, reduces, computes)
    for op, module, dim, keep, reduces, region, computes in itertools.product(
        OPS,
        ("", "a", "b", "a.b"),
        (0, 1, (1,), 2),
        (True, False),
        (None, 5, 100),
        ("forward", "backward"),
        (True, False),
    )
]


@st.composite
def rules(draw: st.DrawFn, name: str) -> Rule:
    region = draw(st.sampled_from(["forward", "forward", "backward", "both"]))
    casts = ["fp32", "lower_precision_fp"] + (["promote", "fp32_set_opt_dtype"] if region == "forward" else [])
    ops = draw(st.lists(st.sampled_from(NAMED), max_size=2, unique=True))
    values, reduces = draw(st.sampled_from(VALUES)), draw(st.sampled_from(REDUCES))
    modules = draw(st.sampled_from(MODULES if ops or values or reduces else MODULES[1:]))
    return Rule(
        name,
        Category(draw(st.sampled_from(casts))),
        tuple(ops),
        modules=modules,
        args=dict(values),
        reduces=reduces,
        region=region,
    )


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    names = draw(st.permutations("pqrs"))[: draw(st.integers(0, 4))]
    return Policy(
        "generated",
        draw(st.sampled_from(["cuda", "cpu"])),
        draw(st.sampled_from(["float16", "bfloat16"])),
        rules=tuple(draw(rules(name)) for name in names),
        unlisted=draw(st.sampled_from(["follow", "follow", "fp32"])),
        loss_scale=draw(st.sampled_from([None, LossScale(), LossScale(init_scale=8.0), LossScale(enabled=False)])),
    )


def decided(policy: Policy, site: Site) -> Rule | None:
    """The rule that decides a call, as annotate-rules and cast-backward ask for it."""
    rule = policy.ruling(site).rule
    return policy.default_rule if rule is None and site.computes and site.region == "forward" else rule


def asks(rule: Rule | None) -> object:
    return None if rule is None else (rule.cast, rule.inputs)


@settings(max_examples=20, deadline=None)
@given(policies(), policies())
def test_it_finds_what_is_decided_differently_and_nothing_else(old: Policy, new: Policy) -> None:
    expected = set()
    for site in SITES:
        one, other = decided(old, site), decided(new, site)
        if asks(one) != asks(other):
            expected.add((site.region, one, other))
    assert {(change.region, change.old, change.new) for change in diff_policies(old, new).ops} == expected


@settings(max_examples=20, deadline=None)
@given(policies(), policies())
def test_it_mirrors(old: Policy, new: Policy) -> None:
    there, back = diff_policies(old, new), diff_policies(new, old)
    assert there.same is back.same
    for name in ("settings", "loss_scale"):
        assert [(c.key, c.new, c.old) for c in getattr(there, name)] == [
            (c.key, c.old, c.new) for c in getattr(back, name)
        ]
    swapped = {OpChange(c.op, c.region, (), c.new, c.old) for c in there.ops}
    assert {replace(c, when=()) for c in back.ops} == swapped
    assert {frozenset(c.when) for c in back.ops} == {frozenset(c.when) for c in there.ops}
    kinds = {"added": "removed", "removed": "added"}
    assert sorted((kinds.get(c.kind, c.kind), ids(c.new), ids(c.old)) for c in there.rules if c.kind != "moved") == (
        sorted((c.kind, ids(c.old), ids(c.new)) for c in back.rules if c.kind != "moved")
    )


def ids(rule: Rule | None) -> str:
    return "" if rule is None else rule.id


def empty(diff: PolicyDiff) -> bool:
    return diff.same and not diff.rules


@settings(max_examples=20, deadline=None)
@given(policies())
def test_with_itself_there_is_nothing(policy: Policy) -> None:
    assert empty(diff_policies(policy, policy))


@pytest.mark.parametrize("name", built_in_names())
def test_built_in_policies_equal_themselves_in_any_spelling(name: str, tmp_path: Path) -> None:
    """Comments, why, the order of rules that cannot meet, and files that are extended, make no difference."""
    policy = Policy.load(name).resolve()
    bare = replace(policy, rules=tuple(replace(rule, why="", ops=rule.ops[::-1]) for rule in policy.rules))
    (tmp_path / "base.toml").write_text("# a comment\n" + bare.dumps())
    (tmp_path / "top.toml").write_text('extends = ["base.toml"]\n')
    assert empty(diff_policies(policy, Policy.load(tmp_path / "top.toml").resolve()))
    if not policy.conditional:
        mixed = list(policy.rules)
        random.Random(0).shuffle(mixed)
        assert empty(diff_policies(policy, replace(policy, rules=tuple(mixed))))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_rules_may_be_split_over_files(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    policy = data.draw(policies())
    parts = policy.dumps().split("[[rule]]")
    cut = data.draw(st.integers(0, len(parts) - 1))
    folder = tmp_path_factory.mktemp("split")
    (folder / "one.toml").write_text("[[rule]]".join(parts[: cut + 1]))
    rest = "".join(f"[[rule]]{part}" for part in parts[cut + 1 :])
    (folder / "two.toml").write_text(f'extends = ["one.toml"]\n{rest}')
    assert empty(diff_policies(policy, Policy.load(folder / "two.toml").resolve()))


@pytest.mark.parametrize("name", ["cuda-float16", "cpu-bfloat16"])
def test_one_changed_cast_of_one_op_is_one_line_of_each(name: str) -> None:
    old = Policy.load(name).resolve()
    for rule in old.rules:
        if len(rule.ops) != 1 or rule.advice or rule.conditional:
            continue
        cast = Category.FP32 if rule.cast is Category.LOWER_PRECISION_FP else Category.LOWER_PRECISION_FP
        new = replace(old, rules=tuple(replace(r, cast=cast) if r is rule else r for r in old.rules))
        diff = diff_policies(old, new)
        assert [(change.kind, change.id, [key.key for key in change.keys]) for change in diff.rules] == [
            ("changed", rule.id, ["cast"])
        ]
        assert [(c.old and c.old.cast, c.new and c.new.cast) for c in diff.ops] == [(rule.cast, cast)]
        assert not diff.settings
        assert not diff.loss_scale


def policy_of(*rules: Rule, **others: object) -> Policy:
    return Policy("p", "cuda", "float16", rules=rules, **others)  # type: ignore[arg-type]


LOW, FP32 = Category.LOWER_PRECISION_FP, Category.FP32


def test_order_counts_where_rules_meet() -> None:
    head, sums = Rule("head", FP32, modules=("lm_head",)), Rule("all", LOW, ("mm",))
    diff = diff_policies(policy_of(sums, head), policy_of(head, sums))
    assert [(c.kind, c.id, ids(c.passed)) for c in diff.rules] == [("moved", "all", "head")]
    assert [(c.op, c.when, ids(c.old), ids(c.new)) for c in diff.ops] == [("mm", ("in lm_head",), "head", "all")]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"args": {"dim": 0}}, {"args": {"dim": 1}}),
        ({"reduces": ">4096"}, {"reduces": "<=4096"}),
        ({"modules": (".encoder.*.norm",)}, {"modules": (".encoder.*.attn", ".decoder")}),
        ({"region": "forward"}, {"region": "backward"}),
    ],
)
def test_order_does_not_count_where_conditions_exclude_each_other(one: dict, other: dict) -> None:
    first, second = Rule("first", FP32, ("mm",), **one), Rule("second", LOW, ("mm",), **other)
    assert empty(diff_policies(policy_of(first, second), policy_of(second, first)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"modules": ("encoder",)}, {"modules": ("decoder",)}),  # encoder.decoder is in both
        ({"args": {"tensors": {"size": ">9"}}}, {"args": {"tensors": {"size": "<9"}}}),  # two tensors of a list
        ({"args": {"dim": 1}}, {"args": {"dim": [1]}}),  # (1,) is both
        ({"reduces": ">4096"}, {"reduces": "<5000"}),
        ({"modules": (".encoder.**.norm",)}, {"modules": (".encoder.0.attn",)}),
    ],
)
def test_order_counts_where_conditions_can_meet(one: dict, other: dict) -> None:
    first, second = Rule("first", FP32, ("mm",), **one), Rule("second", LOW, ("mm",), **other)
    diff = diff_policies(policy_of(first, second), policy_of(second, first))
    assert len(diff.ops) == 1
    assert not diff.same


def test_conditions_that_are_met_together_overrule() -> None:
    """Where a or b is all there is, rules for each of them leave nothing to a rule for both."""
    both, a, b = (Rule("".join(globs), LOW, ("mm",), modules=globs) for globs in (("a", "b"), ("a",), ("b",)))
    wide = replace(both, id="wide", cast=FP32)
    assert diff_policies(policy_of(a, b), policy_of(wide, a, b)).same
    assert not diff_policies(policy_of(a), policy_of(wide, a)).same


def test_a_rule_that_others_overrule_everywhere_decides_nothing() -> None:
    wide = Rule("wide", FP32, ("mm",), args={"self": {"size": ">10", "dtype": ["float32", "bfloat16"]}})
    narrow = Rule("narrow", LOW, ("mm",), args={"self": {"size": ">100", "dtype": "float32"}})
    diff = diff_policies(policy_of(wide), policy_of(narrow, wide))
    assert diff.same
    assert [(change.kind, change.id) for change in diff.rules] == [("added", "narrow")]
    assert not diff_policies(policy_of(wide), policy_of(wide, narrow)).same


def test_renamed_rules_decide_the_same() -> None:
    diff = diff_policies(policy_of(Rule("old", LOW, ("mm",))), policy_of(Rule("new", LOW, ("mm",), why="Faster.")))
    assert diff.same
    assert [(c.kind, ids(c.old), ids(c.new)) for c in diff.rules] == [("renamed", "old", "new")]


def test_a_rule_written_as_two_decides_the_same() -> None:
    old = policy_of(Rule("all", LOW, ("mm", "bmm")))
    assert diff_policies(old, policy_of(Rule("all", LOW, ("bmm",)), Rule("more", LOW, ("mm",)))).same


def test_inputs_and_advice_are_part_of_what_is_decided() -> None:
    old = policy_of(Rule("norm", LOW, ("layer_norm",)), Rule("bce", Category.BANNED, ("bce",), advice="Use logits."))
    new = policy_of(
        Rule("norm", LOW, ("layer_norm",), inputs={"weight": "fp32"}),
        Rule("bce", Category.BANNED, ("bce",), advice="Do not."),
    )
    assert [change.op for change in diff_policies(old, new).ops] == ["layer_norm", "bce"]


def test_the_recipe_is_part_of_what_is_decided() -> None:
    old, new = (policy_of(Rule("fp8", Category.FP8, ("mm",), recipe=recipe)) for recipe in ("tensorwise", "rowwise"))
    diff = diff_policies(old, new)
    assert [change.op for change in diff.ops] == ["mm"] and old.digest != new.digest
    assert [(k.key, k.old, k.new) for c in diff.rules for k in c.keys] == [("recipe", "tensorwise", "rowwise")]


def test_multiples_of_large_numbers_are_not_proven_to_be_related() -> None:
    one, other = (Rule("r", FP32, ("mm",), reduces=f"%{number}") for number in (4099, 4111))
    assert not exclusive(one, other) and not implied(one, [one])


def test_settings() -> None:
    old = policy_of(capability=">=8.0, <9.0", torch=">=2.11", outputs="captured")
    assert empty(diff_policies(old, policy_of(capability="<9.0,>=8.0", torch=">= 2.11")))
    new = policy_of(outputs="keep", unlisted="fp32")
    diff = diff_policies(old, new)
    assert [(c.key, c.old, c.new) for c in diff.settings] == [
        ("capability", ">=8.0, <9.0", None),
        ("torch", ">=2.11", None),
        ("unlisted", "follow", "fp32"),
        ("outputs", "captured", "keep"),
    ]
    assert [(c.op, ids(c.old), ids(c.new)) for c in diff.ops] == [("any op", "", "unlisted")]


def test_loss_scaling_is_compared_as_it_works() -> None:
    half, bf16 = policy_of(), replace(policy_of(), lower_precision_fp="bfloat16")
    assert not diff_policies(half, policy_of(loss_scale=LossScale())).loss_scale
    assert not diff_policies(bf16, replace(bf16, loss_scale=LossScale(init_scale=2.0, enabled=False))).loss_scale
    assert [(c.key, c.old, c.new) for c in diff_policies(half, bf16).loss_scale] == [("enabled", True, False)]
    diff = diff_policies(half, policy_of(loss_scale=LossScale(init_scale=1024.0, max_scale=4096.0)))
    assert [(c.key, c.old, c.new) for c in diff.loss_scale] == [
        ("init_scale", 65536.0, 1024.0),
        ("max_scale", None, 4096.0),
    ]
    assert not diff.same
    assert not diff.rules


def test_names_with_and_without_overload() -> None:
    old, new = policy_of(Rule("m", LOW, ("mm",))), policy_of(Rule("m", LOW, ("mm.default",)))
    assert [change.op for change in diff_policies(old, new).ops] == ["mm (other overloads)"]
    globs = diff_policies(policy_of(Rule("m", LOW, ("conv*",))), policy_of(Rule("m", LOW, ("conv*", "*_relu"))))
    assert [change.op for change in globs.ops] == ["*_relu"]
    one, other = Rule("a", LOW, ("conv*",)), Rule("b", FP32, ("*1d",))
    diff = diff_policies(policy_of(one, other), policy_of(other, one))
    assert [(change.op, ids(change.old), ids(change.new)) for change in diff.ops] == [("*1d and conv*", "b", "a")]


GLOBS = st.lists(st.sampled_from(["a", "b", "*", "?", "[ab]", "[!a]"]), max_size=5).map("".join)


@given(GLOBS, GLOBS, st.text("abc", max_size=5))
def test_two_globs_have_a_common_name_if_a_name_fits_both(first: str, second: str, name: str) -> None:
    common = common_name(first, second)
    if common is not None:
        assert all(fnmatchcase(common, glob) for glob in (first, second))
    else:
        assert not all(fnmatchcase(name, glob) for glob in (first, second))


@given(st.data())
def test_proofs_about_conditions_hold(data: st.DataObject) -> None:
    """Where one rule implies or excludes another, no call of the small world says otherwise."""
    one, other = data.draw(rules("p")), data.draw(rules("q"))
    one, other = (replace(rule, region="both", cast=FP32) for rule in (one, other))
    site = data.draw(st.sampled_from(SITES))
    if not one.covers_op(site.op) or not other.covers_op(site.op):
        return
    holds = [rule.mismatch(site) is None for rule in (one, other)]
    assert not (exclusive(one, other) and all(holds))
    assert not (implied(one, [other]) and holds[1] and not holds[0])


FIRST, SECOND = (
    [">4", "<=4", ">=4,<9", "==4", "!=4", "<4", "%4", "%6,>3"],
    [">4", "<9", "==4", "!=9", ">=5", "%2", "%3"],
)


@given(st.sampled_from(FIRST), st.sampled_from(SECOND))
def test_sizes(first: str, second: str) -> None:
    one, other = (Rule("r", FP32, ("mm",), reduces=size) for size in (first, second))
    held = [[rule.mismatch(Site("aten::mm", reduces=n)) is None for rule in (one, other)] for n in range(40)]
    assert exclusive(one, other) is not any(all(pair) for pair in held)
    assert implied(one, [other]) is all(pair[0] for pair in held if pair[1])


def test_tensor_conditions() -> None:
    def rule(**asked: object) -> Rule:
        return Rule("r", FP32, ("mm",), args={"self": asked})

    facts = TensorFacts("float32", (8, 64))
    narrow = rule(dtype="float32", rank=2, size=">500", shape=["*", 64])
    assert narrow.mismatch(Site("aten::mm", args={"self": facts})) is None
    assert implied(rule(size=">100"), [narrow])
    assert implied(rule(dtype=["float32", "float16"]), [narrow])
    assert implied(rule(shape=["*", 64]), [narrow])
    assert not implied(rule(size=">1000"), [narrow])
    assert not implied(rule(dtype="float16"), [narrow])
    assert not implied(rule(shape=["*", "*"], rank=3), [narrow])
