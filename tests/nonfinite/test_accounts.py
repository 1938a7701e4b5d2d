"""Option "nonfinite": the first op whose result is not finite is named, under each lowering; what is meant is not."""

import gc
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once, exhaustive
from support.oracles.like_autocast import compile_with
from support.programs.small_models import unchanging
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import fxamp
import fxamp.reports.list_graph as list_graph
from fxamp.errors import NonFiniteError
from fxamp.policy import Policy
from fxamp.reports.nonfinite import NonFinite

LOWERINGS = ["eager", "aot_eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.exhaustive])]


def compiled(program: Callable[..., Tensor], lowering: str, mode: str = "log", **options: Any) -> nn.Module:
    """A model whose values are watched, under float16 unless ``options`` say otherwise."""
    model = compile_with(unchanging(program), lowering, **{"policy": "cpu-float16", "nonfinite": mode} | options)
    assert isinstance(model, nn.Module)
    return model


def only(model: nn.Module) -> NonFinite:
    """The one thing that was found."""
    (found,) = fxamp.report(model).nonfinite
    return found


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_op_is_named_with_all_that_is_known_of_it(lowering: str, caplog: pytest.LogCaptureFixture) -> None:
    model = compiled(lambda h: torch.exp(h * 2).sum() + 1, lowering)
    model(torch.ones(2, 4))
    model(torch.full((2, 4), 8.0))
    model(torch.full((2, 4), 9.0))
    found = only(model)
    assert (found.kind, found.op, found.node) == ("op", "aten::exp.default", "exp")
    assert (found.region, found.value) == ("forward", "inf")
    assert (found.step, found.times, found.last) == (2, 2, 3)
    assert (found.dtype, found.without_policy) == ("f16", "f32")
    assert found.source is not None and found.source.file == __file__ and "torch.exp(h * 2)" in found.source.code
    (read,) = found.inputs
    assert (read.node, read.largest) == ("mul", 16.0)
    assert found.before == pytest.approx(7.39, abs=0.01)
    assert [text.partition(" ")[0] for text in found.next_ops] == ["sum_1", "add"]
    said = [record for record in caplog.records if record.name == "fxamp.nonfinite.monitor"]
    assert len(said) == 1 and said[0].getMessage().startswith(found.headline)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_product_that_overflows_is_named_with_its_module_its_rule_and_its_casts(lowering: str) -> None:
    model = compiled(lambda h: h.sum(), lowering)
    nn.init.constant_(model.linear.weight, 60000.0)
    model(torch.full((2, 4), 2.0))
    found = only(model)
    assert (found.op, found.module, found.dtype) == ("aten::linear.default", "linear", "f16")
    assert found.rule is not None and found.rule.id == "matrix-products" and "cpu.toml:" in found.rule.origin
    assert len(found.casts) == 3 and all("to f16 for linear: rule matrix-products" in cast for cast in found.casts)
    assert 'modules = ["linear"]' in found.advice


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_cast_that_overflows_is_named(lowering: str) -> None:
    model = compiled(lambda h, x: (torch.mm(x, h)).sum(), lowering)
    model(torch.ones(2, 4), torch.full((2, 2), 1e6))
    found = only(model)
    assert found.op == "aten::to.dtype" and found.dtype == "f16" and found.without_policy == "f32"
    assert 'ops = ["aten::mm"]' in found.advice


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("what", ["input", "parameter"])
def test_what_comes_in_wrong_is_named_instead(what: str, lowering: str) -> None:
    model = compiled(lambda h: h.exp().sum(), lowering)
    x = torch.ones(2, 4)
    if what == "input":
        x[0, 0] = torch.nan
    else:
        with torch.no_grad():
            model.linear.bias[1] = torch.inf
    model(x)
    assert only(model).kind == what and not only(model).advice


def _masked(h: Tensor, mask: Tensor) -> Tensor:
    return (torch.softmax((h @ h.t()).masked_fill(mask, -torch.inf), -1) @ h).sum()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_softmax_over_a_masked_row_is_named(lowering: str) -> None:
    model = compiled(_masked, lowering)
    model(torch.ones(2, 4), torch.tensor([[True, True], [False, False]]))
    found = only(model)
    assert (found.op, found.value, found.advice) == ("aten::softmax.int", "nan", "")
    assert found.inputs[0].largest == torch.inf


def test_an_infinite_input_of_a_product_is_named_and_not_the_product() -> None:
    model = compiled(lambda h, x: (h @ x).sum(), "eager")
    model(torch.ones(2, 4), torch.tensor([torch.inf, -torch.inf, 0.0, 0.0]))
    assert (only(model).kind, only(model).node) == ("input", "l_more_0_")


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_mode_raise_raises_in_the_call(lowering: str) -> None:
    model = compiled(lambda h: torch.exp(h).sum(), lowering, "raise")
    model(torch.ones(2, 4))
    with pytest.raises(NonFiniteError, match=r"step 2: aten::exp.default is the first value") as caught:
        model(torch.full((2, 4), 20.0))
    assert caught.value.found == only(model)


def test_an_op_inside_of_a_checkpoint_is_named() -> None:
    for lowering in ("eager", "aot_eager"):
        model = compiled(lambda h: checkpoint(lambda x: torch.exp(x * 3) * 0, h, use_reentrant=False).sum(), lowering)
        model(torch.full((2, 4), 20.0)).backward()
        found = fxamp.report(model).nonfinite[0]
        assert found.op == "aten::exp.default" and found.node.endswith("/exp")


@pytest.mark.parametrize("lowering", LOWERINGS[:2])
def test_without_a_policy_values_are_watched_too(lowering: str) -> None:
    model = compiled(lambda h: torch.exp(h).sum(), lowering, policy="auto")
    model(torch.full((2, 4), 1000.0))
    assert (only(model).op, only(model).dtype, only(model).advice) == ("aten::exp.default", "f32", "")


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_op_that_is_not_measured_is_named_if_it_overflows(lowering: str) -> None:
    """What a power, and a product with a number, return follows from the largest magnitude of what they read."""
    model = compiled(lambda h, x: ((x * 0.5) ** 3 - h).sum(), lowering, policy="auto")
    x = torch.tensor([1.0, -3.0, 2.0, 0.0])
    model(torch.ones(2, 4), x)
    model(torch.ones(2, 4), x * 2e15)
    found = only(model)
    assert (found.op, found.value, found.step) == ("aten::pow.Tensor_Scalar", "inf", 2)
    assert (found.inputs[0].largest, found.before) == (pytest.approx(3e15), 3.375)


def test_a_conversion_that_overflows_is_named_through_a_product_with_a_number() -> None:
    """The product is small enough for float16, but not what it reads there."""
    model = compiled(lambda h: (h.float() * 3e4).half().mul(0.25).matmul(torch.eye(4)), "eager")
    model(torch.full((2, 4), 4.0))
    found = only(model)
    assert (found.kind, found.op.rpartition(".")[0], found.value) == ("op", "aten::to", "inf")


@pytest.mark.parametrize("lowering", LOWERINGS[:2])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.complex64])
def test_a_cast_of_the_program_to_other_kinds_of_numbers_is_judged_by_what_is_read(
    dtype: torch.dtype, lowering: str
) -> None:
    """Whether 8 bits saturate depends on the dtype and on torch."""

    def program(h: Tensor) -> Tensor:
        return (h.float() * h.detach()).to(dtype).view(-1).to(torch.float64 if dtype.is_floating_point else dtype)

    model = compiled(program, lowering)
    for step, size in enumerate((1.0, 1e3), 1):
        finite = torch.isfinite(model(torch.full((2, 4), size))).all()
        assert [found.step for found in fxamp.report(model).nonfinite] == ([] if finite else [step])
        assert finite or only(model).op.startswith("aten::to")


OVERFLOWS = {
    "exp": lambda h: (torch.exp(h * 30).sum()).log(),
    "a sum": lambda h: (h * 30000).sum().sqrt(),
    "a product": lambda h: h.mul(300).matmul(h.mul(300).t()).sum(),
    "a division by what underflows": lambda h: 1 / (h * 1e-4 * 1e-4).sum(),
    "a logarithm of what underflows": lambda h: (h * 1e-4 * 1e-4).log().sum(),
    "a cast": lambda h: torch.mm(h, (h.float() * 1e5).t()).sum(),
}


@pytest.mark.parametrize("case", OVERFLOWS)
def test_the_rule_that_is_proposed_works(case: str, tmp_path: Path) -> None:
    program = OVERFLOWS[case]
    model = compiled(program, "eager")
    x = torch.full((2, 4), 0.5)
    model(x)
    assert tomllib.loads(only(model).advice)["rule"][0]["cast"] == "fp32"
    file = tmp_path / "wider.toml"
    file.write_text('extends = ["cpu-float16"]\n' + only(model).advice + "\n")
    wider = compiled(program, "eager", policy=Policy.load(file))
    assert torch.isfinite(wider(x))
    assert fxamp.report(wider).nonfinite == ()


def test_the_environment_can_name_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXAMP_NONFINITE", "raise")
    model = unchanging(lambda h: torch.exp(h).sum())
    model.compile(backend="fxamp", options={"policy": "cpu-float16", "lowering": "eager"})
    with pytest.raises(NonFiniteError):
        model(torch.full((2, 4), 20.0))


@pytest.mark.parametrize("lowering", LOWERINGS[:2])
def test_without_the_option_no_node_is_added(lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for what in (
        "nonfinite.participant.Watching",
        "nonfinite.monitor.Monitor",
        "passes.shared.magnitude_writer.MagnitudeWriter",
    ):
        monkeypatch.setattr(f"fxamp.{what}.__init__", lambda *_, **__: pytest.fail("measured"))
    model = compile_with(unchanging(lambda h: torch.exp(h).sum()), lowering, policy="cpu-float16")
    model(torch.full((2, 4), 20.0)).backward()
    assert fxamp.report(model).nonfinite == ()


def _root(h: Tensor) -> Tensor:
    return torch.where(h > 0, torch.sqrt(h * (h > 0)), 0.0).sum()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_in_a_backward_the_op_of_the_forward_is_named(lowering: str, caplog: pytest.LogCaptureFixture) -> None:
    model = compiled(_root, lowering)
    model(-torch.ones(2, 4)).backward()
    found = only(model)
    op = "autograd::SqrtBackward0" if lowering == "eager" else "aten::div.Tensor"
    assert (found.region, found.op, found.value) == ("backward", op, "nan")
    assert set(found.gradients) == {"linear.weight", "linear.bias"}
    assert found.forward is not None and found.forward.target == "aten::sqrt.default"
    assert found.source is not None and "torch.sqrt" in found.source.code
    assert "in the backward of aten::sqrt.default" in caplog.text


#: Their forwards are finite in float16, their gradients are not: of ones, unless the program scales them.
STEEP = {
    "a sum over a batch": lambda h, x: (h.sum(0) * 50000).float().sum() + (h * 50000).float().mul(0).sum(),
    "a product": lambda h, x: (torch.mm(h, x * 1e4).float() * 100).sum(),
    "a cast": lambda h, x: (torch.mm(h, x).float() * 1e6).sum(),
    "exp": lambda h, x: torch.exp(h * 20).float().mul(100).sum(),
    "a root of what underflows": lambda h, x: torch.sqrt(h * 1e-4 * 1e-4).float().sum(),
}


@each_once("case, lowering", exhaustive(STEEP, always=list(STEEP)[::2]), LOWERINGS[:2])
def test_the_rules_that_are_proposed_for_a_backward_work(case: str, lowering: str, tmp_path: Path) -> None:
    """A gradient that float32 holds may overflow in the next op too: each rule brings it past one op."""
    file, rules = tmp_path / "wider.toml", 'extends = ["cpu-float16"]\n'
    for _ in range(5):
        file.write_text(rules)
        model = compiled(STEEP[case], lowering, policy=Policy.load(file))
        model(torch.full((2, 4), 0.5), torch.eye(4)).backward()
        if not (found := fxamp.report(model).nonfinite):
            break
        assert found[0].region == "backward" and tomllib.loads(found[0].advice)["rule"][0]["cast"] == "fp32"
        rules += found[0].advice + "\n"
    assert "[[rule]]" in rules and not found


@pytest.mark.parametrize("lowering", LOWERINGS[:2])
def test_no_rule_is_proposed_where_float32_does_not_help_a_backward(lowering: str) -> None:
    model = compiled(lambda h: _root(h.float()), lowering)
    model(-torch.ones(2, 4)).backward()
    assert only(model).advice == ""


@pytest.mark.parametrize("lowering", LOWERINGS[:2])
def test_the_rule_for_a_cast_of_the_program_is_for_what_made_the_value(lowering: str) -> None:
    model = compiled(lambda h: (h.float() * 1e6).sum(), lowering)
    model(torch.ones(2, 4)).backward()
    assert 'ops = ["aten::linear"]' in only(model).advice


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_in_a_backward_mode_raise_raises(lowering: str) -> None:
    model = compiled(_root, lowering, "raise")
    with pytest.raises(NonFiniteError, match=r"in the backward of aten::sqrt.default"):
        model(-torch.ones(2, 4)).backward()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_overflow_of_scaled_gradients_is_counted_and_not_raised(
    lowering: str, caplog: pytest.LogCaptureFixture
) -> None:
    scaler = fxamp.GradScaler("cpu", init_scale=2.0**20)
    model = compiled(lambda h: h.float().sum(), lowering, "raise", scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        scaler.scale(model(torch.ones(2, 4))).backward()
        scaler.step(optimizer)
        scaler.update()
    found = only(model)
    assert found.scaled and found.region == "backward" and found.value == "inf" and found.times == 2
    assert "of scaled gradients" in found.headline and "NonFinite" not in caplog.text
    assert scaler.overflows == (found,) and set(found.gradients) == {"linear.weight", "linear.bias"}
    scaler.name_parameters(model)
    assert set(scaler.overflowed()) == set(found.gradients)


def test_a_forward_that_is_not_finite_is_reported_beside_a_scaler_too() -> None:
    model = compiled(lambda h: h.exp().sum(), "aot_eager", "raise", scaler=fxamp.GradScaler("cpu"))
    with pytest.raises(NonFiniteError):
        model(torch.full((2, 4), 20.0))


@pytest.mark.parametrize("policy", ["cpu-float16", "auto"])
def test_a_backward_that_nothing_measures_is_refused_with_and_without_a_policy(policy: str) -> None:
    """Under "auto", a model that has run under autocast has no policy where autocast is off."""
    model, x = compiled(lambda y: y.sum(), "aot_eager", policy=policy), torch.ones(2, 4)
    if policy == "auto":
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(
            BackendCompilerFailed, match=r"option 'nonfinite' measures .* accepted: compiled_autograd = False"
        ),
    ):
        model(x)


def test_a_scaler_forgets_graphs_that_are_gone() -> None:
    scaler = fxamp.GradScaler("cpu", init_scale=2.0**20)
    model = compiled(lambda h: h.float().sum(), "eager", scaler=scaler)
    scaler.scale(model(torch.ones(2, 4))).backward()
    assert len(scaler.graphs.monitors) == len(scaler.overflows) == 1
    del model
    torch._dynamo.reset()
    gc.collect()
    compiled(lambda h: h.sum(), "eager")(torch.ones(2, 4))  # reports drop the records of models that are gone
    assert not scaler.graphs.monitors and not scaler.overflows


def test_a_graph_is_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    listed, entry = [], list_graph._entry
    monkeypatch.setattr(list_graph, "_entry", lambda node, inner: listed.append(node.name) or entry(node, inner))
    compiled(lambda h: torch.exp(h).sum(), "eager")(torch.ones(2, 4))
    assert listed.count("exp") == listed.count("linear") == 1
