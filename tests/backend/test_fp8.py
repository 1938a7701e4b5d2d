"""Policies with products in fp8, end to end: torchao's numbers, and every place where graphs are rewritten."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.exhaustive import exhaustive
from support.oracles.like_autocast import compile_with
from support.oracles.mxfp8_beside import RECIPES as MXFP8
from support.oracles.mxfp8_beside import converted as in_mxfp8
from support.oracles.rounded_training import same, whole_error
from support.oracles.torchao_beside import FNUZ, MULTIPLIED, RECIPES, autocast, converted, multiplied
from support.programs.small_models import Wrapped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.policy import Category, Policy, Rule

PRODUCTS = ("linear", "addmm.default", "mm.default", "matmul")


def policy(recipe: str = "tensorwise", *others: Rule, base: str = "cpu-bfloat16", **more: Any) -> Policy:
    """cpu-bfloat16 with all products in fp8 or mxfp8."""
    exact = Policy.load(base)
    cast = Category.MXFP8 if recipe in MXFP8 else Category.FP8
    rules = (*exact.rules, Rule("fp8", cast, PRODUCTS, recipe=recipe, **more), *others)
    return Policy("fp8", "cpu", exact.lower_precision_fp, rules=rules)


def gradients(call: Callable[..., Any], model: nn.Module, *inputs: Any, **named: Any) -> dict[str, Tensor]:
    model.zero_grad()
    result = call(*inputs, **named)
    loss = getattr(result, "loss", result)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | gradients


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.norm(self.up(x)))).square().mean()


def beside_torchao(model: nn.Module, recipe: str) -> tuple[nn.Module, nn.Module]:
    """``model`` and a copy of it whose linear layers are torchao's.

    torchao quantizes what was cast to bfloat16 to mxfp8, fxamp float32 weights: they hold values of bfloat16.
    """
    if recipe not in MXFP8:
        return model, converted(model, recipe)
    model = model.bfloat16().float()
    return model, in_mxfp8(model, recipe)


ALL_RECIPES = [*MULTIPLIED, *MXFP8]


@pytest.mark.parametrize("recipe", exhaustive(ALL_RECIPES, always=["tensorwise", "rowwise", "rceil", FNUZ[0]]))
@pytest.mark.parametrize("lowering", exhaustive(["eager", "aot_eager"], always=["eager"]))
def test_linear_layers_are_torchaos(recipe: str, lowering: str) -> None:
    model, x = Layers(), torch.randn(2, 16, 32)
    whole = not recipe.startswith("rowwise_with_gw_hp")  # torchao refuses float32 weights with that one
    if not whole:
        model, x = model.bfloat16(), x.bfloat16()
    model, theirs = beside_torchao(model, recipe)

    def beside(value: Tensor) -> Tensor:
        with autocast(torch.bfloat16):
            return theirs(value)

    ours = compile_with(model, policy=policy(recipe), lowering=lowering)
    assert same(gradients(ours, ours, x), gradients(beside if whole else theirs, theirs, x)) == []


class Head(Layers):
    """Besides what runs in fp8: a head, a layer of odd size, and a product of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.lm_head = nn.Linear(32, 20), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(F.gelu(self.norm(self.up(x))))[0]
        return (hidden @ hidden.t()).mean() + self.odd(hidden).mean() + self.lm_head(hidden).float().square().mean()


def test_the_report_lists_what_runs_in_fp8_and_why_the_rest_does_not() -> None:
    model = compile_with(Head(), policy="cpu-bfloat16-fp8", lowering="aot_eager")
    model(torch.randn(1, 16, 32))
    report = fxamp.report(model)
    assert report.graphs[0].ops_by_dtype["fp8"] == 2
    assert str(report).endswith("""
Products in fp8, by recipe:
  tensorwise: 2

Products that run in 16 bits although a rule for fp8 names them:
  graph 0: matmul: the second operand is not a weight: the program computes it
  graph 0: linear_2: rule fp8-linear does not apply: size 0 of weight is 20, not %16
  graph 0: linear_3: rule fp8-heads comes after fp8-linear; Logits over a large vocabulary decide between words whose \
scores are close: 3 bits of mantissa are too few.""")


def test_a_policy_under_which_nothing_runs_in_fp8_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    small = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    compile_with(Wrapped(small), policy="cpu-bfloat16-fp8", lowering="eager")(torch.randn(2, 24))
    compile_with(Wrapped(small[0]), policy="cpu-bfloat16-fp8", lowering="eager")(torch.randn(4, 24))
    convolution = nn.Conv1d(4, 4, 3)
    compile_with(Wrapped(convolution), policy="cpu-bfloat16-fp8", lowering="eager")(torch.randn(1, 4, 8))
    compile_with(Layers(), policy="cpu-bfloat16-fp8", lowering="eager")(torch.randn(2, 16, 32))
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    start, why = "policy cpu-bfloat16-fp8: nothing of a compiled graph runs in fp8: ", "size 0 of weight is 24, not %16"
    assert messages == [
        f"{start}linear stays in 16 bits: rule fp8-linear does not apply: {why}, and 1 more",
        f"{start}linear stays in 16 bits: rule fp8-linear does not apply: {why}",
        f"{start}it has no op that a rule for fp8 names",
    ]


class Tied(nn.Module):
    """Tied weights, a checkpoint, a region without autocast, and a number of rows that is no multiple of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(64, 32), nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.block(checkpoint(self.block, self.embed(tokens), use_reentrant=False))
        with torch.autocast("cpu", enabled=False):
            exact = self.up(x.to(self.up.weight.dtype)).mean()
        logits = x @ self.embed.weight.t()
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()) + exact


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor, again: bool) -> Tensor:
        x = checkpoint(self.block, x * 2, use_reentrant=False) if again else self.block(x * 2)
        return x.float().square().mean()


@pytest.mark.parametrize("recipe", exhaustive([*multiplied(*RECIPES), *MXFP8], always=["rowwise"]))
def test_what_a_checkpoint_computes_again_is_the_same(recipe: str) -> None:
    """pytorch #150859: scales of rows, computed again, must not differ."""
    model, x = Block(), torch.randn(2, 9, 32)
    outcomes = []
    for again in (False, True):
        ours = compile_with(model, policy=policy(recipe), lowering="aot_eager")
        outcomes.append(gradients(ours, ours, x, again))
    assert same(*outcomes) == []


def distance(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest error of a gradient, relative to that gradient."""
    return max(float((ours[name].double() - value).norm() / value.norm()) for name, value in exact.items())


WAYS = [("tensorwise", "cpu-bfloat16"), ("rowwise", "cpu-float16"), ("rowwise_with_gw_hp", "cpu-bfloat16")]
WAYS += [("floor", "cpu-float16"), ("rceil", "cpu-bfloat16"), ("rceil_wgrad_with_hp", "cpu-bfloat16")]


@pytest.mark.parametrize("way", exhaustive(WAYS, always=[]))
def test_every_way_to_run_it_gives_the_same(way: tuple[str, str]) -> None:
    recipe, base = way
    model, tokens = Tied(), torch.randint(64, (4, 17))
    twin = copy.deepcopy(model).double()
    exact = gradients(twin, twin, tokens)
    plain = compile_with(model, policy=policy(recipe, base=base), lowering="eager")
    expected = gradients(plain, plain, tokens)
    assert distance(expected, exact) < 0.35
    torch._dynamo.mark_dynamic(tokens, 1)
    moving = compile_with(model, policy=policy(recipe, base=base), lowering="aot_eager")
    assert same(gradients(moving, moving, tokens), expected) == []
    shorter = tokens[:, :9].contiguous()
    with torch._dynamo.config.patch(error_on_recompile=True):
        results = gradients(moving, moving, shorter)
    anew = compile_with(model, policy=policy(recipe, base=base), lowering="eager")
    assert same(results, gradients(anew, anew, shorter)) == []


@pytest.mark.parametrize("recipe", exhaustive(multiplied("tensorwise", "rowwise", "floor"), always=["tensorwise"]))
def test_a_scaler_sees_what_overflows(recipe: str) -> None:
    model, x = Layers(), torch.randn(2, 16, 32)
    exact = gradients(model, model, x)
    scaler = fxamp.GradScaler("cpu", init_scale=2.0**10)
    ours = compile_with(model, policy=policy(recipe, base="cpu-float16"), lowering="aot_eager", scaler=scaler)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)

    def step(value: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(ours(value)).backward()
        scaler.step(optimizer)
        scaler.update()

    step(x)
    actual = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert distance(actual, {name: exact[name] for name in actual}) < 0.2 and scaler.skipped_steps == 0
    x[0, 3, 4] = torch.inf
    step(x)
    assert scaler.skipped_steps == 1


@pytest.mark.exhaustive
def test_inductor_errs_no_more_and_hides_nothing() -> None:
    model, x = Layers(), torch.randn(2, 16, 32)
    twin = copy.deepcopy(model).double()
    exact = gradients(twin, twin, x.double())
    plain, fused = (compile_with(model, policy=policy("rowwise"), lowering=name) for name in ("aot_eager", "inductor"))
    allowed = 1.25 * whole_error(gradients(plain, plain, x), exact)
    assert whole_error(gradients(fused, fused, x), exact) <= allowed
    for bad in (torch.inf, torch.nan):
        with torch.no_grad():
            fused.up.weight[3, 4] = bad
        ours = gradients(fused, fused, x)
        assert not ours["loss"].isfinite() and not ours["down.weight"].isfinite().all()
