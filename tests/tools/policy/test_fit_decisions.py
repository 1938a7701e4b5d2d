"""Decisions are what policies can say: each option is a policy, and the shipped ones are choices of options."""

import pytest
from torch import nn

from fxamp.policy import Category, Policy, variant_names
from fxamp.policy.model.recipe import FNUZ, RECIPES_OF
from fxamp.policy.model.site import Site
from fxamp.tools.policy.fit.decisions import AS_BASE, Language, Option
from fxamp.tools.policy.fit.layers import scopes


def test_every_option_is_a_policy_that_loads() -> None:
    base = Policy.load("cuda-bfloat16")
    language = Language(base, [*RECIPES_OF])
    net = nn.ModuleList([nn.Linear(8192, 8192, device="meta") for _ in range(4)])
    decisions = language.decisions(scopes(net), net)
    for decision in decisions:
        for option in decision.options[1:]:
            policy = language.policy(base, [option])
            assert policy != base and Policy.loads(policy.dumps()) == policy
    recipes = {option.name for own in decisions if own.name == "products" for option in own.options}
    of_hopper = {f"fp8 {recipe}" for recipe in RECIPES_OF[Category.FP8] if recipe not in FNUZ.values()}
    variants = [Policy.load(name) for name in variant_names() if name.startswith("cuda-bfloat16-")]
    casts = {rule.cast for variant in variants for rule in variant.rules if rule.cast in RECIPES_OF}
    every = {f"{cast} {recipe}" for cast in casts for recipe in RECIPES_OF[cast] if recipe not in FNUZ.values()}
    assert recipes == {AS_BASE, *every}
    hopper = Language(base, ("fp8",)).decisions(scopes(net), net)
    assert {o.name for own in hopper if own.name == "products" for o in own.options} == {AS_BASE, *of_hopper}
    assert not any(own.name == "products" for own in Language(base).decisions(scopes(net), net))


def test_routers_and_heads_may_be_in_float32_where_a_model_has_them() -> None:
    base = Policy.load("cuda-bfloat16")
    language = Language(base)

    def forms(model: nn.Module) -> dict[str, Option]:
        own = [one for one in language.decisions(scopes(model), model) if one.name == "routers and heads"]
        return {option.name: option for one in own for option in one.options[1:]}

    layers = nn.ModuleList([nn.ModuleDict({"router": nn.Linear(64, 4), "up": nn.Linear(64, 64)}) for _ in range(3)])
    mixture = nn.ModuleDict({"layers": layers, "norm": nn.LayerNorm(64)})
    assert not forms(nn.ModuleList([nn.Linear(8, 8)])) and [*forms(mixture)] == ["in float32"]
    exact = forms(mixture)["in float32"]
    mixtures = Policy.load("cuda-bfloat16-moe")
    assert {*exact.rules} == {rule for rule in mixtures.rules if rule.cast is Category.FP32} - {*base.rules}
    norms = next(own for own in language.decisions(scopes(mixture), mixture) if own.name.startswith("norms"))
    stream = next(option for option in norms.options if option.name == "both in 16 bits")
    assert any(rule.id.startswith("moe-routers--") for rule in language.policy(base, [stream]).rules)
    together = language.policy(base, [stream, exact])
    rule = together.ruling(Site("aten::linear", "layers.2.router")).rule
    assert rule is not None and rule.cast is Category.FP32


def test_all_options_of_lean_together_are_lean() -> None:
    base, lean = Policy.load("cuda-bfloat16"), Policy.load("cuda-bfloat16-lean")
    language = Language(base)
    words = {"8 bits, or computed again", "looked up again", "in chunks of 2048"}
    options = [o for own in language.decisions(scopes(None), None) for o in own.options if o.name in words]
    ids = [rule.id for rule in language.policy(base, options).rules]
    extra = {"kept-images", "kept-pointwise-convolutions"}
    assert [name for name in ids if name not in extra] == [rule.id for rule in lean.rules]


@pytest.mark.parametrize(
    ("variant", "names"),
    [
        ("lean", {"8 bits, or computed again", "looked up again", "in chunks of 2048", "8bit"}),
        (
            "leanest",
            {
                "8 bits, norms' inputs too, or computed again",
                "looked up again",
                "computed again",
                "in chunks of 1024",
                "8bit",
            },
        ),
        ("fast-norms", {"norms in 16 bits"}),
        ("fast", {"both in 16 bits"}),
        ("fp8", {"fp8 tensorwise"}),
    ],
)
def test_a_shipped_policy_is_near_a_choice_of_options(variant: str, names: set[str]) -> None:
    language = Language(Policy.load("cuda-bfloat16"), ("fp8",))
    policy = Policy.load(f"cuda-bfloat16-{variant}")
    decisions = language.decisions(scopes(None), None)
    assert {one.options[one.nearest(policy)].name for one in decisions} - {AS_BASE} == names
    assert not any(one.nearest(Policy.load("cuda-bfloat16")) for one in decisions)
