"""float16 outside of the compiled graphs, under an ambient autocast: where true gradients underflow, torch's come."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from exhaustive import each_once
from scaled_runs import assert_same_gradients, named
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.errors import UnscaledError

SCALE = 2.0**24
TINY = 2.0**-27
"""Gradients around this are zero in float16; times the scale they are far from its subnormals."""
LOWERINGS = ("aot_eager", "eager")
EPS = torch.finfo(torch.float16).eps

Run = Callable[[nn.Module, Any, Any], object]


class Mixed(torch.autograd.Function):
    """Computes in float16 under autocast, between float32 results and float32 inputs."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x.half(), w.half())
        return (x @ w).float()

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return (gradient.half() @ w.t()).float(), (x.t() @ gradient.half()).float()


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return Mixed.apply(x.float(), self.weight) * 2


class InPlace(nn.Module):
    """Writes float16 into a part of a float32 tensor, and reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result = x.float() * 2
        result[:, :4] = self.linear(x)[:, :4]
        result[:, 4:].add_(result[:, :4], alpha=2)
        return result


class Branches(nn.Module):
    """A float16 branch and a float32 one, an op of both, a sum of several uses; a norm with float32 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        half = self.one(x)
        wide = half.float().exp() * self.two.weight.sum()
        return self.norm(self.two(half) + half * x) + wide


STAGES: dict[str, type[nn.Module]] = {"linear": Linear, "custom": Custom, "in place": InPlace, "branches": Branches}


class Chain(nn.Module):
    """Stages one after the other; ``compiled`` says which of them are."""

    def __init__(self, stages: Sequence[type[nn.Module]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(stage() for stage in stages)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def compile_stages(chain: Chain, which: str, **options: Any) -> None:
    """By a letter for each stage: c is compiled by fxamp, o by another backend, e stays eager."""
    for stage, letter in zip(chain.stages, which, strict=True):
        if letter == "c":
            stage.compile(backend="fxamp", options=options)
        elif letter == "o":
            stage.compile(backend="aot_eager")


def data(seed: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def forward(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return net(x)


def loss_of(result: Tensor) -> Tensor:
    return result.float().square().mean() * TINY


def once(net: nn.Module, scaler: Any, x: Tensor) -> None:
    scaler.scale(loss_of(forward(net, x))).backward()


def by_torch(net: nn.Module, run: Run = once, scale: float = SCALE) -> dict[str, Tensor]:
    net, scaler, x = copy.deepcopy(net), torch.amp.GradScaler("cpu", init_scale=scale), data().requires_grad_()
    run(net, scaler, x)
    scaler.unscale_(torch.optim.SGD([*net.parameters(), x], lr=0.1))
    return named(net, [x])


def by_fxamp(net: Any, which: str, lowering: str, run: Run = once, scale: float = SCALE) -> dict[str, Tensor]:
    net, scaler, x = copy.deepcopy(net), fxamp.GradScaler("cpu", init_scale=scale), data().requires_grad_()
    compile_stages(net, which, scaler=scaler, lowering=lowering)
    scaler.attach()
    run(net, scaler, x)
    scaler.unscale_(torch.optim.SGD([*net.parameters(), x], lr=0.1))
    return named(net, [x])


def assert_close(got: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Within a few roundings to float16, where a graph's border in float32 spares one."""
    assert reference and got.keys() == reference.keys()
    for name, gradient in reference.items():
        assert gradient.any() and gradient.abs().max() < 2.0**-18, name
        assert (got[name] - gradient).norm() <= 8 * EPS * gradient.norm(), name


@each_once("which, lowering", ["ec", "ce", "ece", "cec", "ecec", "eee", "oco", "cco"], LOWERINGS)
def test_a_chain_has_torchs_gradients_bit_for_bit(which: str, lowering: str) -> None:
    chain = Chain([Linear] * len(which))
    reference = by_torch(chain)
    assert_same_gradients(by_fxamp(chain, which, lowering), reference)
    assert all(gradient.abs().max() < 2.0**-18 for gradient in reference.values())


@each_once("kind, which, lowering", STAGES, ["cec", "ece", "eee", "coc"], LOWERINGS)
def test_every_kind_of_stage(kind: str, which: str, lowering: str) -> None:
    if kind == "in place" and lowering == "eager":
        which = which.replace("o", "e")
    chain = Chain([Linear, STAGES[kind], Linear])
    assert_close(by_fxamp(chain, which, lowering), by_torch(chain))


def accumulated(net: nn.Module, scaler: Any, x: Tensor) -> None:
    for seed in range(3):
        scaler.scale(loss_of(forward(net, x * (1 + seed)))).backward()


def two_losses_one_after_the_other(net: nn.Module, scaler: Any, x: Tensor) -> None:
    result = forward(net, x)
    scaler.scale(loss_of(result)).backward(retain_graph=True)
    scaler.scale(loss_of(result[1:])).backward()


def two_losses_at_once(net: nn.Module, scaler: Any, x: Tensor) -> None:
    result = forward(net, x)
    losses = scaler.scale([loss_of(result), loss_of(result[1:] * 2)])
    torch.autograd.backward(losses)


def a_sum_of_scaled_losses(net: nn.Module, scaler: Any, x: Tensor) -> None:
    one, two = forward(net, x), forward(net, x * 2)
    ((scaler.scale(loss_of(one)) + scaler.scale(loss_of(two))) / 2).backward()


def scaled_twice_run_once(net: nn.Module, scaler: Any, x: Tensor) -> None:
    loss = loss_of(forward(net, x))
    scaler.scale(loss)
    scaler.scale(loss).backward()


def only_some_inputs(net: nn.Module, scaler: Any, x: Tensor) -> None:
    scaler.scale(loss_of(forward(net, x))).backward(inputs=[x, *net.parameters()])


def a_float16_loss(net: nn.Module, scaler: Any, x: Tensor) -> None:
    with torch.autocast("cpu", torch.float16):
        loss = (torch.nn.functional.linear(net(x), torch.full((1, 8), 2.0**-14)) * 2.0**-6).sum()
    assert loss.dtype == torch.float16
    scaler.scale(loss).backward()


def float16_results(net: nn.Module, scaler: Any, x: Tensor) -> None:
    with torch.autocast("cpu", torch.float16):
        results = torch.nn.functional.linear(net(x), torch.full((3, 8), 0.25))
    assert results.dtype == torch.float16
    scaler.scale(results).backward(torch.full((4, 3), 2.0**-20, dtype=torch.float16))


def inside_of_autocast(net: nn.Module, scaler: Any, x: Tensor) -> None:
    with torch.autocast("cpu", torch.float16):
        scaler.scale(net(x).float().square().mean() * TINY).backward()


def checkpointed(net: Any, scaler: Any, x: Tensor) -> None:
    with torch.autocast("cpu", torch.float16):
        for stage in net.stages:
            x = checkpoint(stage, x, use_reentrant=False)
    scaler.scale(loss_of(x)).backward()


def two_calls(net: nn.Module, scaler: Any, x: Tensor) -> None:
    one, two = forward(net, x), forward(net, x + 1)
    scaler.scale(loss_of(one * two)).backward()


RUNS = [
    accumulated,
    two_losses_one_after_the_other,
    two_losses_at_once,
    a_sum_of_scaled_losses,
    scaled_twice_run_once,
    only_some_inputs,
    inside_of_autocast,
    checkpointed,
    two_calls,
]


@each_once("run, which, lowering", RUNS, ["ece", "cec"], LOWERINGS)
def test_every_way_to_run_a_backward(run: Run, which: str, lowering: str) -> None:
    chain = Chain([Linear] * 3)
    assert_close(by_fxamp(chain, which, lowering, run), by_torch(chain, run))


@pytest.mark.parametrize("which", ["ec", "ce"])
@pytest.mark.parametrize("run", [a_float16_loss, float16_results])
def test_what_is_scaled_may_be_float16_itself(run: Run, which: str) -> None:
    chain = Chain([Linear] * 2)
    # A float16 tensor that is scaled itself takes no larger scale than float16 does.
    scale = 2.0**15
    assert_close(by_fxamp(chain, which, "aot_eager", run, scale), by_torch(chain, run, scale))


class Tied(nn.Module):
    """One weight in a graph and in eager code, rows of it looked up; a frozen layer; a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 8)
        self.middle, self.frozen, self.unused = Linear(), Linear().requires_grad_(False), nn.Linear(2, 2)
        self.stages = nn.ModuleList([self.middle])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.frozen(self.table(torch.tensor([0, 3, 3, 5])) + x))
        return nn.functional.linear(hidden, self.table.weight)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_tied_frozen_and_unused_weights(lowering: str) -> None:
    assert_close(by_fxamp(Tied(), "c", lowering), by_torch(Tied()))


@pytest.mark.parametrize("max_norm", [1e-12, 1.0])
def test_clipping_and_training(max_norm: float) -> None:
    """``.grad`` is true without unscale_, and steps, skips and scales are torch's."""
    results = []
    for mine in (True, False):
        torch._dynamo.reset()
        net = Chain([Linear] * 3)
        scaler: Any = (fxamp.GradScaler if mine else torch.amp.GradScaler)("cpu", init_scale=SCALE, growth_interval=2)
        if mine:
            compile_stages(net, "ece", scaler=scaler, lowering="aot_eager")
        optimizer = torch.optim.SGD(net.parameters(), lr=2.0**25, momentum=0.9)
        states = []
        for step in range(6):
            loss = loss_of(forward(net, data(step))) * (2.0**30 if step in (1, 4) else 1.0)
            scaler.scale(loss).backward()
            if not mine:
                scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            states.append((scaler.loss_scale if mine else scaler.get_scale(), norm.isfinite().item()))
        results.append((states, [p.detach() for p in net.parameters()]))
    (states, got), (expected, reference) = results
    assert states == expected and not all(finite for _, finite in states)
    for a, b in zip(got, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=8 * EPS, atol=1e-6)


@pytest.mark.parametrize("which", ["ece", "cec"])
def test_an_overflow_outside_skips_the_step(which: str) -> None:
    net, scaler = Chain([Linear] * 3), fxamp.GradScaler("cpu", init_scale=2.0**4)
    compile_stages(net, which, scaler=scaler, lowering="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for factor, skipped in ((1.0, False), (2.0**16, True), (1.0, False)):
        scaler.scale(forward(net, data()).float().sum() * factor).backward()
        assert scaler.step(optimizer, return_skipped=True).skipped is skipped
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_backward_that_was_not_scaled_stays_true(lowering: str) -> None:
    """Nothing hooks it: it is right as far as float16's range goes, in graphs with float16 at their borders too."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        return (x.half() @ w.half()).half()

    scaler = fxamp.GradScaler("cpu", init_scale=2.0**4)
    call = torch.compile(program, backend="fxamp", options={"scaler": scaler, "lowering": lowering})
    gradients = []
    for function in (call, program):
        x, w = data().half().requires_grad_(), torch.full((8, 8), 0.5, requires_grad=True)
        inner = x * 1
        function(inner, w).float().sum().backward()
        gradients.append((x.grad, w.grad))
    for got, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(got, reference, rtol=4 * EPS, atol=0)


def stem_and_head(scaler: Any, x: Tensor) -> tuple[nn.Module, Tensor, Tensor]:
    """An eager module, its result, and the scaled loss of a compiled module after it."""
    torch.manual_seed(0)
    stem, head = nn.Linear(8, 8), nn.Linear(8, 1)
    if isinstance(scaler, fxamp.GradScaler):
        head.compile(backend="fxamp", options={"scaler": scaler, "policy": "cpu-float16", "lowering": "aot_eager"})
    hidden = stem(x)
    return stem, hidden, scaler.scale(head(hidden).float().square().mean())


def test_a_use_that_is_not_scaled_stays_true_after_one_that_is() -> None:
    """A probe of a graph through which a scaled backward has run: autograd.grad of what no scaler saw."""
    gradients = []
    for kind in (fxamp.GradScaler, torch.amp.GradScaler):
        stem, hidden, loss = stem_and_head(kind("cpu", init_scale=2.0**10), data())
        loss.backward(retain_graph=True)
        gradients += torch.autograd.grad(hidden.sum(), stem.weight)
    assert torch.equal(*gradients)


def test_float32_gradients_on_the_way_are_true() -> None:
    """Those that a hook sees, and autograd.grad's, of leaves and of all else, are the loss's times get_scale()."""
    gradients: dict[type, list[Tensor]] = {fxamp.GradScaler: [], torch.amp.GradScaler: []}
    for kind, tensors in gradients.items():
        scaler = kind("cpu", init_scale=2.0**10)
        stem, hidden, loss = stem_and_head(scaler, data())
        hidden.register_hook(tensors.append)
        tensors += torch.autograd.grad(loss, [hidden, stem.weight])
        tensors[:] = [gradient / scaler.get_scale() for gradient in tensors]
    for got, exact in zip(*gradients.values(), strict=True):
        assert exact.any() and (got - exact).norm() <= 4 * EPS * exact.norm()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_float16_crosses_the_borders_of_graphs_with_the_scale(lowering: str) -> None:
    """Programs that hand out float16 of their own will, one after the other; a float16 leaf keeps true gradients."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        return (x.half() @ w.half()).half()

    scaler = fxamp.GradScaler("cpu", init_scale=2.0**10)
    call = torch.compile(program, backend="fxamp", options={"scaler": scaler, "lowering": lowering})
    reference = []
    for function in (program, call):
        x, one, two = data().half().requires_grad_(), *(torch.eye(8).requires_grad_() for _ in range(2))
        loss = function(function(x, one) * 1, two).float().sum()
        (loss * 2.0**-20 if function is program else scaler.scale(loss * 2.0**-30)).backward()
        if function is program:
            reference = [one.grad * 2.0**-10, two.grad * 2.0**-10]
        else:
            assert torch.equal(one.grad, reference[0]) and torch.equal(two.grad, reference[1]) and one.grad.any()
            assert x.grad.dtype == torch.float16 and not x.grad.any(), "2**-30 is below float16's smallest"


def test_the_gradient_of_a_gradient() -> None:
    """A penalty through eager float16 code and a region that is compiled by the eager lowering."""
    results = []
    for mine in (True, False):
        torch._dynamo.reset()
        net, x = Chain([Linear] * 3), data().requires_grad_()
        scaler = fxamp.GradScaler("cpu", init_scale=2.0**4)
        if mine:
            compile_stages(net, "ece", scaler=scaler, lowering="eager", policy="cpu-float16")
        with torch.autocast("cpu", torch.float16, enabled=mine):
            loss = net(x).float().square().sum()
            (gradient,) = torch.autograd.grad(scaler.scale(loss) if mine else loss, x, create_graph=True)
            total = loss + gradient.square().sum()
        (scaler.scale(total) if mine else total).backward()
        results.append([p.grad for p in net.parameters()])
    for got, exact in zip(*results, strict=True):
        assert (got - exact).norm() <= 64 * EPS * exact.norm()


class Nested(torch.autograd.Function):
    """A checkpoint of another library: its backward runs a backward of its own."""

    @staticmethod
    def forward(ctx: Any, stage: nn.Module, x: Tensor) -> Tensor:
        ctx.stage, ctx.kept = stage, x.detach()
        with torch.no_grad():
            return stage(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        x = ctx.kept.requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", torch.float16):
            result = ctx.stage.linear(x)
        torch.autograd.backward(result, gradient)
        return None, x.grad


class Ends(nn.Module):
    """Eager float16, then something, then eager float16."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = Linear(), Linear(), Linear()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.between(self.two, self.one(x)))


def reentrant(stage: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(stage, x, use_reentrant=True)


REFUSED: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], str]] = {
    "a reentrant checkpoint": (reentrant, r"reentrant checkpoint.*use_reentrant=False"),
    "one between float32": (lambda s, x: reentrant(lambda y: s(y).float(), x.float()), r"use_reentrant=False"),
    "a nested backward": (lambda s, x: Nested.apply(s, x), r"^Nested runs another backward inside its own"),
    "a float16 parameter": (lambda s, x: s.half()(x), r"a float16 parameter of shape \(8,\)|\(8, 8\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_refused_and_names_what_can(case: str) -> None:
    between, message = REFUSED[case]
    net, scaler = Ends(between), fxamp.GradScaler("cpu", init_scale=SCALE)
    net.three.compile(backend="fxamp", options={"scaler": scaler, "lowering": "aot_eager"})
    loss = loss_of(forward(net, data().requires_grad_()))
    with pytest.raises(UnscaledError, match=message) as raised:
        scaler.scale(loss).backward()
    assert "leave 'scaler' out of the options" in str(raised.value).lower()


class Wide(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


def test_a_reentrant_checkpoint_of_a_compiled_module_goes_on_between_float32() -> None:
    chain = Chain([Wide])
    net, scaler = copy.deepcopy(chain), fxamp.GradScaler("cpu", init_scale=SCALE)
    compile_stages(net, "c", scaler=scaler, lowering="aot_eager")
    x = data().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        result = checkpoint(net.stages[0], x, use_reentrant=True)
    scaler.scale(loss_of(result)).backward()
    assert_same_gradients(named(net, [x]), by_torch(chain))


def test_two_scalers_do_not_meet_in_float16() -> None:
    net, scaler, other = Chain([Linear] * 2), *(fxamp.GradScaler("cpu", init_scale=SCALE) for _ in range(2))
    compile_stages(net, "ec", scaler=other, lowering="aot_eager")
    scaler.attach()
    loss = loss_of(forward(net, data()))
    with pytest.raises(UnscaledError, match="another"):
        scaler.scale(loss)
    other.scale(loss).backward()


def test_a_graph_that_is_not_recognised_is_not_scaled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a later torch keep its metadata elsewhere."""
    monkeypatch.setattr("fxamp.scaler.outside_graphs.borders.graph_metadata", lambda function: [])
    net, scaler = Chain([Linear] * 2), fxamp.GradScaler("cpu", init_scale=SCALE)
    compile_stages(net, "ec", scaler=scaler, lowering="aot_eager")
    with pytest.raises(RuntimeError, match="does not recognise its own graphs"):
        once(net, scaler, data())
