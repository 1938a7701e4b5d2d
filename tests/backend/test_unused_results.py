"""Graphs whose training uses some of several results: eager's gradients, and no zeros for the others."""

import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once, exhaustive
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import fxamp
from fxamp import torch_private as private
from fxamp.backend import inductor, unused_results
from fxamp.tools.common.running_ops import RunningOps

#: Every choice of three results, one after another, and some again: more than are compiled for.
CHOICES = [(0,), (0, 1), (0,), (2,), (1, 2), (0, 1, 2), (1,), (0, 2), (0,)]


class Net(nn.Module):
    """A loss, logits and a view of what is within; ``first`` is in all of them, ``last`` in the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.first(x).tanh()
        logits = self.last(hidden)
        return logits.float().logsumexp(-1).mean(), logits, hidden[1:]


@pytest.fixture
def compiled_backwards(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The backward graphs that were compiled."""
    callables: list[Any] = []
    real = unused_results.UnusedResults.backward

    def noted(self: Any, compiler: Callable[..., Any]) -> Any:
        def noting(graph: Any, examples: Any) -> Any:
            callables.append(graph)
            return compiler(graph, examples)

        return real(self, noting)

    monkeypatch.setattr(unused_results.UnusedResults, "backward", noted)
    return callables


class Zeros(RunningOps):
    """Notes the shapes of the zeros that autograd writes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def ran(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if op is torch.ops.aten.zeros.default:
            self.shapes.append(tuple(args[0]))


def compiled(net: nn.Module, scaled: bool, **options: Any) -> tuple[Callable[..., Any], Callable[[Tensor], Tensor]]:
    options |= {"policy": "cpu-float16" if scaled else "cpu-bfloat16"}
    if not scaled:
        return torch.compile(net, backend="fxamp", options=options), lambda loss: loss
    scaler = fxamp.GradScaler("cpu", init_scale=128.0)
    return torch.compile(net, backend="fxamp", options=options | {"scaler": scaler}), scaler.scale


def assert_same(net: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(net.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None or not ours.grad.any(), name
            continue
        assert ours.grad is not None, name
        atol = 2e-2 * float(theirs.grad.abs().max())
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=2e-2, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def run_choices(function: Callable[..., Any], scale: Callable[[Tensor], Tensor], net: Net, reference: Net) -> None:
    for used in CHOICES:
        x = torch.randn(5, 4)
        for model in (net, reference):
            model.zero_grad()
        ours, theirs = function(x), reference(x)
        scale(sum((ours[at].float().sum() for at in used), torch.zeros(()))).backward()
        sum((theirs[at].sum() for at in used), torch.zeros(())).backward()
        assert_same(net, reference)


def twins() -> tuple[Net, Net]:
    net, reference = Net(), Net()
    reference.load_state_dict(net.state_dict())
    return net, reference


@pytest.mark.parametrize(("lower", "scaled"), [*product(["aot_eager", "eager"], [False, True])])
def test_gradients_are_eager_s_for_every_choice_of_results(
    lower: str, scaled: bool, compiled_backwards: list[Any]
) -> None:
    net, reference = twins()
    run_choices(*compiled(net, scaled, lowering=lower), net, reference)
    # (0,), (0, 1) and (2,); then one for all, to which zeros are given.
    assert len(compiled_backwards) == (0 if lower == "eager" else unused_results.MOST + 1)


def test_zeros_have_the_strides_of_the_gradients() -> None:
    """More choices than are compiled for; the backward reads the sum with an unused result's gradient as a view."""

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        hidden = nn.functional.linear(x, w).transpose(1, 2)
        return hidden, hidden.sum(), (hidden * 2).sum(0), hidden[1:].cos()

    function = torch.compile(program, backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": "aot_eager"})
    leaves = [torch.randn(2, 4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)]
    for used in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            theirs = program(*leaves)
        gradients = [torch.autograd.grad(results[used].sum(), leaves) for results in (function(*leaves), theirs)]
        assert_equal(*gradients)


@pytest.mark.inductor
def test_inductor_compiles_a_backward_for_each_choice(compiled_backwards: list[Any]) -> None:
    """It is called when the backward first runs, and takes fewer inputs."""

    def program(w: Tensor) -> tuple[Tensor, Tensor]:
        scaled = w * 3
        return scaled.sum(), scaled

    function = torch.compile(program, backend="fxamp", options={"policy": "cpu-bfloat16"})
    w = torch.ones(4, requires_grad=True)
    for used, expected in ((0, 3.0), (1, 6.0), (0, 3.0)):
        w.grad = None
        (function(w)[used] * (used + 1)).sum().backward()
        assert w.grad is not None and bool(w.grad.eq(expected).all())
    assert len(compiled_backwards) == 2


@pytest.mark.parametrize("scaled", [False, True])
def test_no_zeros_are_written_for_unused_results(scaled: bool) -> None:
    net = Net()
    function, scale = compiled(net, scaled, lowering="aot_eager")
    loss, *_ = function(torch.randn(5, 4))
    with Zeros() as zeros:
        scale(loss).backward()
    assert not {(5, 3), (4, 6)} & set(zeros.shapes) and net.last.weight.grad is not None
    with Zeros() as plain:
        Net.forward(net, torch.randn(5, 4))[0].backward()
        torch.compile(net, backend="aot_eager")(torch.randn(5, 4))[0].backward()
    assert {(5, 3), (4, 6)} <= set(plain.shapes), "this is what torch writes; else the test sees nothing"


@pytest.mark.parametrize("scaled, dynamic", [(False, False), (False, True), (True, False)])
def test_a_retained_graph_runs_for_one_result_and_then_for_another(scaled: bool, dynamic: bool) -> None:
    net, reference = twins()
    x = torch.randn(5, 4)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    function, scale = compiled(net, scaled, lowering="aot_eager")
    ours, theirs = function(x), reference(x)
    for at in (0, 2, 0):
        scale(ours[at].float().sum()).backward(retain_graph=True)
        theirs[at].sum().backward(retain_graph=True)
        assert_same(net, reference)


@pytest.mark.inductor
@pytest.mark.parametrize("stored", exhaustive([True, False], always=[True]))
@pytest.mark.parametrize("results", exhaustive([1, 2], always=[1]))
def test_kernels_overwrite_saved_tensors_unless_the_graph_is_kept(
    results: int, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's kernels do, which is a third of a large model's memory: a loss's gradient in the place of logits."""
    overwritten = []

    def donated_inputs() -> list[int] | None:
        overwritten.append(private.donated_inputs())
        return overwritten[-1]

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = (x @ w).float().exp().tanh()
        return (y.sum(), y)[:results]

    monkeypatch.setattr(inductor, "donated_inputs", donated_inputs)
    monkeypatch.setattr(inductor, "stores_backwards", lambda: stored)
    scaler = fxamp.GradScaler("cpu", init_scale=128.0)
    run = torch.compile(program, backend="fxamp", options={"policy": "cpu-float16", "scaler": scaler})
    x, w, gradients = torch.rand(4, 4), torch.rand(4, 4, requires_grad=True), []
    with fresh_cache():
        for kept in (False, True, False):
            w.grad = None
            (loss, *_) = run(x, w)
            if kept:
                scaler.scale(loss).backward(retain_graph=True)
            scaler.scale(loss).backward()
            assert w.grad is not None
            gradients.append(w.grad / 2 if kept else w.grad)
    assert_equal(gradients, gradients[:1] * 3)
    forward, once, again = overwritten
    assert (bool(forward), bool(once), bool(again)) == (False, True, False)


def test_results_that_share_memory_and_inputs_that_are_written_to() -> None:
    """A result of each kind of AOTAutograd's: a view of an input, an input that was written to, a view of a result."""

    def program(x: Tensor, w: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        total.add_(w.detach().sum())
        y = x * w
        return y, y.t(), w.view(-1), y.sum(), total * w

    for used in [(0,), (1,), (2,), (3, 4), (1, 3), (0, 1, 2, 3, 4)]:
        gradients = []
        for compile_it in (True, False):
            torch.manual_seed(0)
            torch._dynamo.reset()
            x, w, total = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True), torch.zeros(())
            options = {"policy": "cpu-bfloat16", "lowering": "aot_eager"}
            function = torch.compile(program, backend="fxamp", options=options) if compile_it else program
            results = function(x, w, total)
            sum((results[at].float().sum() * (at + 1) for at in used), torch.zeros(())).backward()
            gradients.append((w.grad, total))
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def two_results(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return (x * w).tanh(), x.sin() * w


def an_input_and_more(value: Tensor, w: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    return value.float(), (value + w).relu(), *rest


def with_a_break(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    value, unused = two_results(x, w)
    torch._dynamo.graph_break()
    return an_input_and_more(value, w, unused)


@pytest.mark.parametrize("made_by", ["fxamp", "torch"])
def test_a_result_that_is_an_input_leaves_the_graph_that_made_it_alone(made_by: str) -> None:
    """The node of such a result belongs to another graph, whose backward takes zeros and not None."""

    def through(backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
        options = {"policy": "cpu-bfloat16", "lowering": "aot_eager"} if backend == "fxamp" else None
        return torch.compile(function, backend=backend, options=options)

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        if made_by == "fxamp":
            return through("fxamp", with_a_break)(x, w)
        return through("fxamp", an_input_and_more)(through("aot_eager", two_results)(x, w)[0], w)

    gradients = []
    for function in (run, with_a_break):
        torch.manual_seed(0)
        torch._dynamo.reset()
        x, w = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
        first, second, *_ = function(x, w)
        (first.sum() + second.sum()).backward()
        gradients.append(w.grad)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


@pytest.fixture
def dynamic_shapes() -> Iterator[None]:
    with torch._dynamo.config.patch(assume_static_by_default=False):
        yield


def test_results_of_unknown_sizes_keep_torch_s_zeros(dynamic_shapes: None, compiled_backwards: list[Any]) -> None:
    net, reference = twins()
    function, _ = compiled(net, False, lowering="aot_eager")
    for rows in (5, 7, 9):
        x = torch.randn(rows, 4)
        for model in (net, reference):
            model.zero_grad()
        function(x)[0].backward()
        reference(x)[0].backward()
        assert_same(net, reference)
    assert not compiled_backwards


def test_hooks_on_results_see_what_there_is() -> None:
    net = Net()
    function, _ = compiled(net, False, lowering="aot_eager")
    loss, logits, _ = function(torch.randn(5, 4))
    gradients: list[Tensor] = []
    logits.register_hook(gradients.append)
    (loss + logits.sum()).backward()
    assert len(gradients) == 1 and bool(gradients[0].eq(1).all())


def test_compiled_autograd_keeps_its_zeros() -> None:
    net, reference = twins()
    x = torch.randn(5, 4)
    function, _ = compiled(net, False, lowering="aot_eager")
    loss, *_ = function(x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    reference(x)[0].backward()
    assert_same(net, reference)


def test_nothing_is_held_once_a_result_is_gone() -> None:
    """Without the garbage collector: activations are freed as soon as nobody needs them."""
    net = Net()
    function, _ = compiled(net, False, lowering="aot_eager")
    function(torch.randn(5, 4))[0].backward()
    results = function(torch.randn(5, 4))
    node = weakref.ref(results[0].grad_fn)
    gc.disable()
    try:
        del results
        assert node() is None
    finally:
        gc.enable()


def masked(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The gradient of the second result has sizes that depend on values."""
    hidden = nn.functional.linear(x, w)
    return hidden.relu(), hidden[hidden > 0].sum(), (hidden * 2).sum(0)


@each_once("used, dynamic", range(3), [False, True])
def test_sizes_that_depend_on_values(used: int, dynamic: bool) -> None:
    leaves = [torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)]
    options = {"policy": "cpu-bfloat16", "lowering": "aot_eager"}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        ours = torch.compile(masked, backend="fxamp", options=options, dynamic=dynamic, fullgraph=True)(*leaves)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = masked(*leaves)
    gradients = [torch.autograd.grad(results[used].float().square().sum(), leaves) for results in (ours, theirs)]
    assert_equal(*gradients)
