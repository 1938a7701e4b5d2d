"""Rules for the backward: which ops of AOTAutograd's backward graph they cover, and what they do to gradients.

The programs hold whole numbers, which bfloat16 multiplies and adds exactly in the forward: what a gradient lacks, the
backward has rounded.
"""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import fxamp
from fxamp import Policy, Rule
from fxamp.pipeline.participant import boxed
from fxamp.policy import Category

LOW, FP32 = Category.LOWER_PRECISION_FP, Category.FP32
BASE = Policy.load("cpu-bfloat16")
COMPILED = ["aot_eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.exhaustive])]
WIDE = Rule("wide", FP32, ("mm", "sum"), region="backward")


def whole(*shape: int, seed: int = 0, most: int = 15) -> Tensor:
    """Whole numbers up to ``most`` in size, as float32."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


class Layer(nn.Module):
    """One product, whose gradients are sums over ``rows`` products of whole numbers."""

    def __init__(self, off: bool = False) -> None:
        super().__init__()
        self.first, self.off = nn.Linear(4, 4), off
        with torch.no_grad():
            self.first.weight.copy_(whole(4, 4, seed=1, most=1))
            self.first.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.off):
            return self.first(x)


X, TANGENT = whole(33, 4, seed=2), whole(33, 4, seed=3)


def gradients(
    model: nn.Module, policy: Policy | None, lowering: str = "aot_eager", **options: Any
) -> dict[str, Tensor]:
    """Every gradient, of the input too; policy None: in float64, without compiling."""
    torch._dynamo.reset()
    x = X.clone().requires_grad_()
    if policy is None:
        model, x = model.double(), X.double().requires_grad_()
        out = model.first(x)
    else:
        out = torch.compile(model, backend="fxamp", options={"policy": policy, "lowering": lowering, **options})(x)
    out.backward(TANGENT.to(out.dtype))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {"x": x.grad}


def with_rules(*rules: Rule) -> Policy:
    return replace(BASE, rules=BASE.rules + rules)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, bool]:
    return {name: torch.equal(a[name].double(), b[name].double()) for name in b}


@pytest.mark.parametrize("lowering", COMPILED)
def test_a_backward_in_float32_gives_exact_gradients(lowering: str) -> None:
    exact = gradients(Layer(), None)
    assert not same(gradients(Layer(), BASE, lowering), exact)["first.weight"]
    got = gradients(Layer(), with_rules(WIDE), lowering)
    assert all(same(got, exact).values())
    assert all(gradient.dtype is torch.float32 for gradient in got.values())


def test_a_backward_in_16_bits_of_a_forward_in_float32() -> None:
    rules = (Rule("float32", FP32, ("linear",)), Rule("low", LOW, ("mm",), region="backward"))
    got, (x, tangent) = gradients(Layer(), with_rules(*rules)), (X.bfloat16(), TANGENT.bfloat16())
    assert torch.equal(got["first.weight"], (tangent.t() @ x).float())
    assert torch.equal(got["x"], (tangent @ Layer().first.weight.bfloat16()).float())
    assert torch.equal(got["first.bias"].double(), TANGENT.double().sum(0))


@pytest.mark.parametrize(
    ("condition", "covered"),
    [
        ({"modules": ("first",)}, True),
        ({"modules": ("second",)}, False),
        ({"module_classes": ("Linear",)}, True),
        ({"args": {"mat2": {"dtype": "bfloat16"}}}, True),
        ({"args": {"mat2": {"dtype": "float32"}}}, False),
        ({"region": "both"}, True),
        ({"region": "forward"}, False),
    ],
)
def test_conditions_hold_in_the_backward_too(condition: dict[str, Any], covered: bool) -> None:
    rule = Rule("wide", FP32, ("mm",), **{"region": "backward", **condition})
    plain, got = gradients(Layer(), BASE), gradients(Layer(), with_rules(rule))
    assert same(got, plain)["first.weight"] is not covered
    assert same(got, plain)["first.bias"]


def test_no_rule_holds_in_the_backward_of_a_region_without_autocast() -> None:
    low = with_rules(Rule("low", LOW, ("mm", "sum"), region="backward"))
    assert all(same(gradients(Layer(off=True), low), gradients(Layer(), None)).values())


def test_a_scaled_backward_has_the_rules_too() -> None:
    scaler = fxamp.GradScaler("cpu", init_scale=2.0**8)
    base = Policy.load("cpu-float16")
    wide = replace(base, rules=(*base.rules, WIDE))
    exact = gradients(Layer(), None)
    assert all(same(gradients(Layer(), wide, scaler=scaler), exact).values())


def test_ops_with_several_results_get_them_back_in_their_dtypes() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x)

    exact, plain = gradients(Norm(), None), None
    errors = []
    for rules in ((), (Rule("norm", FP32, ("native_layer_norm_backward", "mm"), region="backward"),)):
        torch.manual_seed(0)
        plain = gradients(Norm(), with_rules(*rules))
        errors.append({name: (plain[name].double() - exact[name]).norm() for name in exact})
    assert {name for name in exact if errors[1][name] < errors[0][name]} >= {"first.0.weight", "first.1.weight"}


def test_an_op_that_refuses_keeps_its_dtypes() -> None:
    mixed = Rule("mixed", FP32, ("mm",), region="backward", inputs={"mat2": "follow"})
    assert all(same(gradients(Layer(), with_rules(mixed)), gradients(Layer(), BASE)).values())


def test_eager_lowering_and_compiled_autograd_refuse_such_policies() -> None:
    with pytest.raises(
        BackendCompilerFailed,
        match=r".* rules for the backward \('wide'\), but lowering = 'eager'.*'aot_eager'",
    ):
        gradients(Layer(), with_rules(WIDE), "eager")
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(
            BackendCompilerFailed,
            match=r"rules for the backward .*compiled_autograd .* accepted: compiled_autograd = False",
        ),
    ):
        gradients(Layer(), with_rules(WIDE))


def test_a_backward_rule_that_matches_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fxamp"):
        for _ in range(2):
            gradients(Layer(), with_rules(Rule("typo", FP32, ("mn",), region="backward"), WIDE))
    messages = [record.message for record in caplog.records if "matched no op" in record.message]
    assert messages == ["policy cpu-bfloat16: rule 'typo' (made in Python) matched no op of a backward graph"]


@pytest.mark.exhaustive
def test_inductor_has_the_ops_that_the_readme_names_but_the_norm_s(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Conv1d(4, 4, 1), nn.LayerNorm(33), nn.Linear(33, 33))

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x.t().unsqueeze(0))[0].t()

    names = ("mm", "sum.dim_IntList", "convolution_backward", "native_layer_norm_backward")
    rules = [Rule(name, FP32, (name,), region="backward") for name in names]
    # Its graphs run as they are: which ops they have does not depend on the code that it would write.
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda gm, *_, **__: boxed(gm))
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        caplog.at_level(logging.WARNING, logger="fxamp"),
    ):
        gradients(Convolved(), with_rules(*rules), "inductor")
    messages = [record.message for record in caplog.records if "matched no op" in record.message]
    assert len(messages) == 1 and "rule 'native_layer_norm_backward'" in messages[0]
