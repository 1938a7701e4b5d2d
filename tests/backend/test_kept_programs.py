"""Kept values in all kinds of programs: computed again, at random, checkpointed, scaled, twice, of any shape."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.checks.exhaustive import exhaustive
from support.machines.lacks import needs_compiler
from test_kept_rules import BASE, LEAST, Attention, Perceptron, X, all_in, compiled_gradients, held, policy, same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp import Policy, Rule

COMPILED = ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.exhaustive])]
AGAIN = Rule("again", keep="recompute", region="kept", elements=">=1")  # type: ignore[arg-type]


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(F.dropout(self.up(x), 0.3))), 0.5).float().pow(2).mean()


@pytest.mark.parametrize("make", exhaustive([Perceptron, Attention, Dropout], always=[Attention]))
def test_computing_again_changes_no_bit_and_holds_less(make: type[nn.Module]) -> None:
    model = make()
    torch.manual_seed(1)
    loss, plain, _ = compiled_gradients(model, X, BASE)
    torch.manual_seed(1)
    loss_again, gradients, report = compiled_gradients(model, X, policy(AGAIN))
    assert torch.equal(loss, loss_again) and same(plain, gradients)
    again = [value for value in report.graphs[-1].kept if value.form == "recompute"]
    assert again and all(value.rule is not None and value.rule.id == "again" for value in again)
    assert held(model, X, policy(AGAIN), "aot_eager").bytes < held(model, X, BASE, "aot_eager").bytes


@pytest.mark.exhaustive  # test_kept_rules runs another form of keeping under Inductor
@needs_compiler
def test_under_inductor_norms_and_activations_are_computed_again() -> None:
    ops = ("gelu", "native_layer_norm")
    again = Rule("again", keep="recompute", region="kept", ops=ops)  # type: ignore[arg-type]
    model = Perceptron()
    before, after = (held(model, X, rules, "inductor").bytes for rules in (BASE, policy(again)))
    assert after < 0.7 * before
    loss, plain, _ = compiled_gradients(model, X, BASE, "inductor")
    loss_again, gradients, _ = compiled_gradients(model, X, policy(again), "inductor")
    torch.testing.assert_close(loss, loss_again, rtol=1e-6, atol=0)
    for name, gradient in plain.items():
        assert (gradients[name] - gradient).norm() <= 5e-3 * gradient.norm(), name


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Perceptron(), nn.Linear(32, 32)

    def inner(self, x: Tensor) -> Tensor:
        return self.first.down(F.gelu(self.first.up(self.second(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, self.second(x), use_reentrant=False)
        return self.second(x).float().pow(2).mean()


class Broken(nn.Module):
    """Two graphs; the first one's result is the second one's input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.first(x))
        torch._dynamo.graph_break()
        return torch.sigmoid(self.second(x)).float().pow(2).mean()


@pytest.mark.parametrize("make", exhaustive([Checkpointed, Broken], always=[Checkpointed]))
def test_gradients_are_close_to_those_without(make: type[nn.Module]) -> None:
    model = make()
    loss, plain, _ = compiled_gradients(model, X, BASE)
    loss_again, gradients, report = compiled_gradients(model, X, all_in("int8"))
    assert torch.equal(loss, loss_again) and plain.keys() == gradients.keys()
    assert not same(plain, gradients)
    packed = [value for graph in report.graphs for value in graph.kept if value.form.startswith("int8")]
    assert packed
    for name, gradient in plain.items():
        assert (gradients[name] - gradient).norm() <= 0.03 * gradient.norm(), name


def test_a_value_is_packed_once_however_often_the_backward_runs() -> None:
    model, rules = Perceptron(), all_in("int8")
    compiled = torch.compile(model, backend="fxamp", options={"policy": rules, "lowering": "aot_eager"})
    loss = compiled(X)
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, 2 * first[name])


@pytest.mark.parametrize("keep", exhaustive(["int8", "float8_e4m3fn"], always=["int8"]))
def test_a_scaled_backward_unpacks_the_same(keep: str) -> None:
    """A power of two scales gradients exactly in float32 and bfloat16."""
    model, rules = Perceptron(), all_in(keep)
    _, plain, _ = compiled_gradients(model, X, rules)
    scaler = fxamp.GradScaler("cpu", init_scale=2.0**8)
    _, scaled, _ = compiled_gradients(model, X, rules, scaler=scaler)
    assert same(plain, scaled)


class AnyShape(nn.Module):
    def __init__(self, fused_attention: bool = True) -> None:
        super().__init__()
        self.fused_attention = fused_attention
        self.norm, self.qkv, self.up, self.down = (
            nn.LayerNorm(32),
            nn.Linear(32, 96),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        if self.fused_attention:
            q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = torch.softmax(self.norm(x) @ x.transpose(1, 2), -1) @ x
        return (x + self.down(F.gelu(self.up(self.norm(x))))).float().pow(2).mean()


@pytest.mark.parametrize("fused_attention", exhaustive([True, False], always=[]))
def test_shapes_may_change(fused_attention: bool) -> None:
    model = AnyShape(fused_attention)
    rules = policy(Rule("all", keep="int8", region="kept", elements=f">={LEAST}"))  # type: ignore[arg-type]
    options: dict[str, Any] = {"policy": rules, "lowering": "aot_eager"}
    compiled = torch.compile(model, backend="fxamp", dynamic=True, options=options)
    for x in shapes():
        compiled(x).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        model(x).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                assert name.startswith("qkv") and not fused_attention
                continue
            assert (gradients[name] - parameter.grad).norm() <= 0.05 * parameter.grad.norm(), name
        model.zero_grad()
    graphs = fxamp.report(compiled).graphs
    assert len(graphs) == 1
    packed = {value.op for value in graphs[0].kept if value.form.startswith("int8")}
    assert {"aten::gelu.default", "aten::_softmax.default", "aten::native_layer_norm.default"} <= packed


def shapes() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for batch, length in ((3, 17), (5, 40)):
        yield torch.randn(batch, length, 32, generator=generator)


def test_where_autocast_is_off_nothing_is_packed() -> None:
    class Off(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                x = torch.sigmoid(self.inner(x))
            return torch.sigmoid(x * 2).pow(2).mean()

    _, _, report = compiled_gradients(Off(), X, all_in("int8"))
    forms = {value.name: (value.form, value.reason) for value in report.graphs[-1].kept}
    assert ("f32", "autocast is off where it is computed") in forms.values()
    assert any(form.startswith("int8") for form, _ in forms.values())


def test_the_shipped_policy_keeps_what_it_promises() -> None:
    lean = Policy.load("cpu-bfloat16-lean")
    x = torch.randn(4, 64, 32)
    _, _, report = compiled_gradients(AnyShape(), x, lean)
    forms = {(value.op, value.dtype): value.form for value in report.graphs[-1].kept}
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu.default"
    assert forms[attention, "bf16"] == "bf16" and forms[attention, "f32"] == "f32"
    assert forms["aten::_softmax.default", "bf16"] == "bf16"
    assert forms["aten::gelu.default", "bf16"] == "recompute"
    assert forms["aten::addmm.default", "bf16"] == "int8/64"


class Rectified(nn.Module):
    """The first feature is ``largest``, the others are around one."""

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 1)
        with torch.no_grad():
            self.down.weight.copy_(torch.arange(64))
            self.up.weight.copy_(torch.eye(32).repeat(2, 1))
            self.up.bias.copy_(largest * (torch.arange(64) == 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).float().sum()


@pytest.mark.parametrize("lowering", COMPILED)
@pytest.mark.parametrize("largest", exhaustive([1e3, 1e9], always=[1e9]))
def test_small_results_of_relu_keep_their_gradients(largest: float, lowering: str) -> None:
    """Integers beside the largest feature round the others to zero; floats of 8 bits keep their signs."""
    model, x = Rectified(largest), torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    x = x.clamp(-3, 3) + 0.1 * x.sign()
    rounded = compiled_gradients(model, x, all_in("int8"), lowering)[1]
    lean = compiled_gradients(model, x, Policy.load("cpu-bfloat16-lean"), lowering)[1]
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        model(x).backward()
    expected = model.up.bias.grad
    assert expected is not None and expected[1:].all()
    assert torch.equal(lean["up.bias"], expected)
    assert not rounded["up.bias"][1:32].any(), "those that share a scale with the first"


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        for _ in range(2):
            x = x + self.down(F.silu(self.gate(self.norm(x))) * self.up(self.norm(x)))
        return x.float().pow(2).mean()


@pytest.mark.exhaustive
def test_the_leanest_policy_holds_the_least() -> None:
    model, x = Gated(), torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0))
    before, lean, leanest = (
        held(model, x, Policy.load(f"cpu-bfloat16{kind}"), "aot_eager").bytes for kind in ("", "-lean", "-leanest")
    )
    assert lean < 0.6 * before and leanest < 0.35 * before
    loss, plain, _ = compiled_gradients(model, x, BASE)
    loss_again, gradients, _ = compiled_gradients(model, x, Policy.load("cpu-bfloat16-leanest"))
    assert torch.equal(loss, loss_again)
    for name, gradient in plain.items():
        assert (gradients[name] - gradient).norm() <= 0.03 * gradient.norm(), name
