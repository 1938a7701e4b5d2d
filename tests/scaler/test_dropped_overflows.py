"""An overflow whose gradients are dropped skips no step, as with torch's scaler; one that may still be held does."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.checks.exhaustive import each_once, exhaustive
from support.oracles.scaled_runs import compile_scaled, finish, leaf, make_scaler
from support.programs.small_models import Layer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.scaler.graphs import graph_flags
from fxamp.scaler.torch_contract import gradient_check

LOWERINGS, SKIPS = ("eager", "aot_eager"), ("host", "device")
BAD = 1e8
"""A factor of the loss at which every gradient overflows in float16."""


class Net(nn.Module):
    """Two layers; ``split`` puts each into a graph of its own, so that the gradient between them has no owner."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        self.lower, self.upper, self.split = nn.Linear(8, 8), nn.Linear(8, 4), split

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.lower(x).relu()
        if self.split:
            torch._dynamo.graph_break()
        return self.upper(hidden)


class Loop:
    """Two models, ``net`` and ``maker``, whose result ``net`` can read; an optimizer for each layer; one scaler.

    ``skip``: of fxamp's scaler; None: torch's scaler and backend, as torch 2.11's compiled gradients are not eager's.
    """

    def __init__(self, lowering: str, skip: str | None, split: bool) -> None:
        torch.manual_seed(0)
        self.net, self.maker = Net(split), Layer(8)
        layers = {"lower": self.net.lower, "upper": self.net.upper, "net": self.net, "maker": self.maker}
        self.parameters = {name: list(layer.parameters()) for name, layer in layers.items()}
        self.optimizers = {name: torch.optim.SGD(own, lr=0.1) for name, own in self.parameters.items()}
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        backend: dict[str, Any] = {"backend": lowering}
        if skip is not None:
            self.scaler = fxamp.GradScaler(
                "cpu", init_scale=1024.0, growth_interval=2, skip=skip, step_lowering="aot_eager"
            )
            backend = {"backend": "fxamp", "options": {"scaler": self.scaler, "lowering": lowering}}
        for model in (self.net, self.maker):
            model.compile(**backend)
        self.generator = torch.Generator().manual_seed(1)
        self.seen: list[Any] = []

    def backward(self, bad: bool = False, through: bool = False, only: str = "net") -> None:
        """Run a backward of ``net``, ``through``: on what ``maker`` makes; or of ``only`` maker."""
        with torch.autocast("cpu", torch.float16):
            x = torch.randn(4, 8, generator=self.generator)
            result = self.maker(x) if only == "maker" else self.net(self.maker(x) if through else x)
        self.scaler.scale(result.float().square().mean() * (BAD if bad else 1.0)).backward()

    def drop(self, *names: str) -> None:
        for name in names:
            self.optimizers[name].zero_grad()

    def finish(self, *names: str) -> None:
        """Step those of the optimizers that have gradients, update, and drop all gradients."""
        for name in names:
            own, optimizer = self.parameters[name], self.optimizers[name]
            if any(parameter.grad is not None for parameter in own):
                before = [parameter.detach().clone() for parameter in own]
                self.scaler.step(optimizer)
                self.seen.append(any(not torch.equal(one, other) for one, other in zip(before, own, strict=True)))
                self.seen += [parameter.detach().clone() for parameter in own]
        if names:
            self.scaler.update()
            self.seen.append(self.scaler.state_dict()["scale"])
        self.drop("net", "maker")


def drop_the_batch(loop: Loop) -> None:
    for bad in (False, False, True, False, False):
        loop.backward(bad)
        loop.backward(bad)
        loop.finish(*([] if bad else ["net"]))


def frozen_discriminator(loop: Loop) -> None:
    for bad in (False, True, False):
        loop.net.requires_grad_(False)
        loop.backward(bad, through=True)
        loop.net.requires_grad_(True)
        loop.drop("net")
        loop.backward()
        loop.finish("maker", "net")


def discriminator(loop: Loop) -> None:
    for bad in (False, True, False):
        loop.backward(bad, through=True)
        loop.drop("net")
        loop.backward()
        loop.backward()
        loop.finish("maker", "net")


def half_kept(loop: Loop) -> None:
    for bad in (False, True, False):
        loop.backward(bad)
        loop.drop("upper")
        loop.backward()
        loop.backward()
        loop.finish("lower", "upper")


def half_dropped(loop: Loop) -> None:
    """One optimizer has both halves, and the step must skip."""
    for bad in (False, True, False):
        loop.backward(bad)
        loop.drop("upper")
        loop.backward()
        loop.finish("net")


def separate(loop: Loop) -> None:
    """Two losses, each of one model; the gradients of the first are there before the second overflows."""
    for bad in (False, True, False):
        loop.backward(only="maker")
        loop.backward(bad)
        loop.finish("maker", "net")


def kept(loop: Loop) -> None:
    for bads in ([True, False], [False, True], [False, False]):
        for bad in bads:
            loop.backward(bad)
        loop.finish("net")


PROGRAMS: dict[str, Callable[[Loop], None]] = {
    program.__name__: program
    for program in (drop_the_batch, frozen_discriminator, discriminator, half_kept, half_dropped, separate, kept)
}


def assert_as_torch(program: Callable[[Loop], None], lowering: str, skip: str, split: bool) -> None:
    torch._dynamo.reset()
    ours, theirs = Loop(lowering, skip, split), Loop(lowering, None, split)
    for loop in (ours, theirs):
        program(loop)
    assert len(ours.seen) == len(theirs.seen)
    torch.testing.assert_close(ours.seen, theirs.seen, rtol=1e-3, atol=1e-4)


@each_once("program, lowering, skip, split", list(PROGRAMS), LOWERINGS, SKIPS, [True, False])
def test_steps_scale_and_weights_are_torchs(
    program: str, lowering: str, skip: str, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the host knows flags at once or only the device does."""
    if skip == "device":
        monkeypatch.setattr(graph_flags, "known", lambda flags: None)
        monkeypatch.setattr(gradient_check, "known", lambda flags: None)
    assert_as_torch(PROGRAMS[program], lowering, skip, split)


backwards = st.tuples(
    st.just("backward"), st.sampled_from([False, False, True]), st.booleans(), st.sampled_from(["net", "net", "maker"])
)
drops = st.tuples(st.just("drop"), st.sampled_from(["lower", "upper", "net", "maker"]))
finishes = st.tuples(st.just("finish"), st.sampled_from([("net", "maker"), ("lower", "upper", "maker")]))


@pytest.mark.parametrize("lowering", exhaustive(LOWERINGS, always=["eager"]))
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(st.lists(st.one_of(backwards, backwards, drops, drops, finishes), min_size=4, max_size=14), st.booleans())
@example([("backward", True, True), ("drop", "net"), ("backward", False, False)], True)
def test_any_order_of_backwards_and_drops_is_torchs(
    lowering: str, calls: Sequence[tuple[Any, ...]], split: bool
) -> None:
    def program(loop: Loop) -> None:
        for name, *arguments in calls:
            if name == "finish":
                (names,) = arguments
                have = [one for one in names if any(p.grad is not None for p in loop.parameters[one])]
                loop.finish(*have)
            else:
                getattr(loop, name)(*arguments)
        loop.backward(through=True)
        loop.finish("net", "maker")

    assert_as_torch(program, lowering, "host", split)


# ---- overflows that nothing shows any more: hooks clamp them. torch's scaler does not see them; fxamp must ----


def clamp(gradient: Tensor) -> Tensor:
    return gradient.nan_to_num(0.0, 1.0, -1.0).clamp(-1, 1)


def layer(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Layer(activation=torch.tanh)


class Clamped:
    """Two graphs, eager code with a parameter between them, and a hook there that clamps what overflows above."""

    def __init__(self, lowering: str) -> None:
        self.scaler, self.lower, self.between = make_scaler(), layer(), nn.Parameter(torch.ones(4))
        self.below = compile_scaled(self.lower, self.scaler, lowering)
        self.above = compile_scaled(lambda hidden: hidden.half() * 4, self.scaler, lowering)
        self.optimizers: list[torch.optim.Optimizer] = []

    def backward(self, bad: bool) -> None:
        hidden = self.below(leaf(2, 4).detach()) * self.between
        hidden.register_hook(clamp)
        # 200 * 2**8 is float16's, four times that is not.
        self.scaler.scale(self.above(hidden).float().sum() * (200 if bad else 1)).backward()

    def skips(self, *parameters: Tensor) -> bool:
        self.optimizers.append(torch.optim.SGD(parameters, lr=0.1))
        assert all(parameter.grad.isfinite().all() for parameter in parameters)
        skipped: bool = self.scaler.step(self.optimizers[-1], return_skipped=True).skipped
        return skipped


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("kept", ["everything", "a graph's parameter", "a parameter outside of graphs"])
def test_an_overflow_between_graphs_counts_while_one_of_its_gradients_is_held(lowering: str, kept: str) -> None:
    loop = Clamped(lowering)
    loop.backward(bad=True)
    weight, bias = loop.lower.linear.weight, loop.lower.linear.bias
    if kept != "everything":
        bias.grad = None
    if kept == "a parameter outside of graphs":
        weight.grad = None
    loop.backward(bad=False)
    assert loop.skips(weight, bias, loop.between)
    if kept == "a parameter outside of graphs":
        assert not loop.skips(weight, bias)
    elif kept == "a graph's parameter":
        assert loop.skips(weight) and not loop.skips(bias)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_overflow_in_one_of_two_calls_counts_in_the_backward_of_both(lowering: str) -> None:
    """Neither has a gradient before, and the hook sees only their sum."""
    net, scaler = layer(), make_scaler()
    compiled = compile_scaled(net, scaler, lowering)
    for parameter in net.parameters():
        parameter.register_hook(clamp)
    first, second = (compiled(leaf(2, 4, seed=seed).detach()).sum() for seed in (0, 1))
    for one, other in ((first * 1e38, second), (first, second * 1e38)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler.scale(one + other).backward(retain_graph=True)
        assert finish(scaler, optimizer) == [True]


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_overflow_in_a_reentrant_checkpoint_counts_below_it(lowering: str) -> None:
    """The backward of the lower checkpoint begins after that of the upper one has ended, but inside of the same."""
    scaler, nets = make_scaler(), [layer(0), layer(1)]
    below, above = (compile_scaled(net, scaler, lowering) for net in nets)
    hidden = checkpoint(below, leaf(2, 4), use_reentrant=True)
    hidden.register_hook(clamp)
    scaler.scale(checkpoint(above, hidden, use_reentrant=True).float().sum() * 1e38).backward()
    optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.1)
    assert all(parameter.grad.isfinite().all() for parameter in nets[0].parameters())
    assert scaler.step(optimizer, return_skipped=True).skipped


class Rerun(torch.autograd.Function):
    """A checkpoint of another library: its backward runs a backward of its own, and returns what that returns."""

    @staticmethod
    def forward(ctx: Any, compiled: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.compiled, ctx.parameters = compiled, parameters
        ctx.save_for_backward(x)
        return compiled(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.enable_grad():
            result = ctx.compiled(*ctx.saved_tensors)
        return None, None, *torch.autograd.grad(result, ctx.parameters, gradient)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("factors", [(1e38, 1.0), (1.0, 1e38)])
def test_an_overflow_that_waits_in_an_outer_backward_counts(factors: Sequence[float], lowering: str) -> None:
    """Both calls have the same parameters, whose gradients are None until the backwards of both have ended."""
    net, scaler = layer(), make_scaler()
    compiled, parameters = compile_scaled(net, scaler, lowering), list(net.parameters())
    for parameter in parameters:
        parameter.register_hook(clamp)
    results = [Rerun.apply(compiled, leaf(2, 4).detach(), *parameters) for _ in factors]  # type: ignore[no-untyped-call]
    losses = [result.float().sum() * factor for result, factor in zip(results, factors, strict=True)]
    scaler.scale(torch.stack(losses).sum()).backward()
    assert scaler.step(torch.optim.SGD(parameters, lr=0.1), return_skipped=True).skipped


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_overflow_that_autograd_grad_returned_counts(lowering: str) -> None:
    """The program has it, and may weigh a loss with it, as here."""
    net, scaler, x = layer(), make_scaler(), leaf(2, 4)
    compiled, optimizer = compile_scaled(net, scaler, lowering), torch.optim.SGD(net.parameters(), lr=0.1)
    (gradient,) = torch.autograd.grad(scaler.scale(compiled(x).sum() * 1e38), x)
    weigh = clamp(gradient.abs().sum())
    for _ in range(2):
        scaler.scale(compiled(x).sum() * weigh).backward()
    assert scaler.step(optimizer, return_skipped=True).skipped


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("drop", [True, False])
def test_an_overflow_in_a_backward_that_raises(lowering: str, drop: bool) -> None:
    """What it has added to gradients counts until it is dropped."""
    first, second, scaler = layer(0), layer(1), make_scaler()
    below, above = (compile_scaled(net, scaler, lowering) for net in (first, second))
    parameters = [*first.parameters(), *second.parameters()]
    optimizer, x = torch.optim.SGD(parameters, lr=0.1), leaf(2, 4).detach()
    hidden = below(x)
    hidden.register_hook(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        scaler.scale(above(hidden).float().sum() * 1e38).backward()
    if drop:
        optimizer.zero_grad()
    for _ in range(2):
        scaler.scale(above(below(x)).float().sum()).backward()
    assert scaler.step(optimizer, return_skipped=True).skipped is not drop


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_overflow_that_autograd_grad_returned_counts_beside_a_held_gradient(lowering: str) -> None:
    """Reports of both are combined, as no gradient is dropped between them."""
    net, scaler, x = layer(), make_scaler(), leaf(2, 4)
    compiled, optimizer = compile_scaled(net, scaler, lowering), torch.optim.SGD(net.parameters(), lr=0.1)
    scaler.scale(compiled(x).sum()).backward()
    (gradient,) = torch.autograd.grad(scaler.scale(compiled(x).sum() * 1e38), x)
    scaler.scale(compiled(x).sum() * 1e38).backward()
    optimizer.zero_grad()
    scaler.scale(compiled(x).sum() * clamp(gradient.abs().sum())).backward()
    assert scaler.step(optimizer, return_skipped=True).skipped
