"""float16 at the borders of compiled graphs: shared weights, steps, what stays true, and what cannot be followed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from float16_stages import (
    EPS,
    LOWERINGS,
    SCALE,
    Chain,
    Linear,
    assert_close,
    by_fxamp,
    by_torch,
    compile_stages,
    data,
    forward,
    loss_of,
    once,
)
from support.oracles.scaled_runs import assert_same_gradients, finish, named
from support.programs.small_models import Forwarding
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.errors import UnscaledError


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
    torch.testing.assert_close(got, reference, rtol=8 * EPS, atol=1e-6)


@pytest.mark.parametrize("which", ["ece", "cec"])
def test_an_overflow_outside_skips_the_step(which: str) -> None:
    net, scaler = Chain([Linear] * 3), fxamp.GradScaler("cpu", init_scale=2.0**4)
    compile_stages(net, which, scaler=scaler, lowering="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for factor, skipped in ((1.0, False), (2.0**16, True), (1.0, False)):
        scaler.scale(forward(net, data()).float().sum() * factor).backward()
        assert finish(scaler, optimizer) == [skipped]


def half_product(x: Tensor, w: Tensor) -> Tensor:
    return (x.half() @ w.half()).half()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_backward_that_was_not_scaled_stays_true(lowering: str) -> None:
    """Nothing hooks it: it is right as far as float16's range goes, in graphs with float16 at their borders too."""
    scaler = fxamp.GradScaler("cpu", init_scale=2.0**4)
    call = torch.compile(half_product, backend="fxamp", options={"scaler": scaler, "lowering": lowering})
    gradients = []
    for function in (call, half_product):
        x, w = data().half().requires_grad_(), torch.full((8, 8), 0.5, requires_grad=True)
        inner = x * 1
        function(inner, w).float().sum().backward()
        gradients.append((x.grad, w.grad))
    torch.testing.assert_close(*gradients, rtol=4 * EPS, atol=0)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_float16_result_that_is_a_tensor_of_others(lowering: str) -> None:
    """AOTAutograd's metadata of the plain graph inside lists no tangents."""
    gradients = []
    for scaler in (fxamp.GradScaler("cpu", init_scale=2.0**10), None):
        torch.manual_seed(0)
        net, x = nn.Linear(8, 8), torch.nested.nested_tensor([data(), data(1)[:3]], layout=torch.jagged)
        if scaler is not None:
            net = Forwarding(net)
            net.compile(backend="fxamp", options={"scaler": scaler, "lowering": lowering})
        loss = forward(net, x).values().float().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    torch.testing.assert_close(*gradients, rtol=4 * EPS, atol=1e-4)


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
    scaler = fxamp.GradScaler("cpu", init_scale=2.0**10)
    call = torch.compile(half_product, backend="fxamp", options={"scaler": scaler, "lowering": lowering})
    reference = []
    for function in (half_product, call):
        x, one, two = data().half().requires_grad_(), *(torch.eye(8).requires_grad_() for _ in range(2))
        loss = function(function(x, one) * 1, two).float().sum()
        (loss * 2.0**-20 if function is half_product else scaler.scale(loss * 2.0**-30)).backward()
        if function is half_product:
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


class Uncompiled(Forwarding):
    """Has the attributes of a compiled module, and is not compiled itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(torch.compile(inner, backend="eager"))

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x).float()


REFUSED: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], str]] = {
    "a reentrant checkpoint": (reentrant, r"reentrant checkpoint.*use_reentrant=False"),
    "one between float32": (lambda s, x: reentrant(lambda y: s(y).float(), x.float()), r"use_reentrant=False"),
    "one that forwards attributes": (
        lambda s, x: reentrant(Uncompiled(s), x.float()),
        r"use_reentrant=False",
    ),
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
