"""policy="auto" follows what the program says: autocast around it, in it, off, or seen before and not here."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once, exhaustive
from support.oracles.like_autocast import compile_with, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.backend import auto_products

UNITS = {"plain": {"avx512_bf16": False}, "bfloat16": {"avx512_bf16": True}}
LOWERINGS = pytest.mark.parametrize("lowering", ["eager", "aot_eager"])


@pytest.fixture(params=UNITS, autouse=True)
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CPU on which "auto" alone casts nothing, and one on which it casts whatever the size of the products."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: UNITS[request.param])
    monkeypatch.setattr(auto_products, "FLOPS_PER_ELEMENT", 0)
    monkeypatch.setattr(auto_products, "FLOPS_PER_CALL", 0)
    kind: str = request.param
    return kind


class Net(nn.Module):
    """Regions in a row and in each other; what is outside runs in float32 under eager torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth, fifth, last = self.layers
        x = first(x)
        with torch.autocast("cpu", torch.bfloat16):
            x = second(x)
            with torch.autocast("cpu", enabled=False):
                x = third(x.float())
            with torch.autocast("cpu", torch.float16):
                x = fourth(x)
        with torch.autocast("cpu", torch.float16):
            x = fifth(x)
        return last(x.float())


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).square() * 1e4)


def compiled(model: nn.Module, lowering: str = "aot_eager", **options: object) -> Any:
    return compile_with(model, lowering, policy="auto", **options)


def policies(model: Callable[..., object]) -> list[str]:
    return [graph.policy for graph in fxamp.report(model).graphs]


def assert_as_eager(model: nn.Module, *inputs: Tensor, lowering: str = "aot_eager") -> nn.Module:
    """Results and gradients of the compiled ``model`` are eager torch's, which casts in the model's regions only."""
    twin = compiled(model, lowering)
    results, gradients = run(twin, inputs)
    reference, expected = run(model, inputs)
    assert [result.dtype for result in results] == [result.dtype for result in reference]
    assert gradients.keys() == expected.keys()
    pairs = [*zip(results, reference, strict=True), *((gradients[name], result) for name, result in expected.items())]
    for ours, theirs in pairs:
        assert torch.equal(ours, theirs)
    return twin


@LOWERINGS
def test_regions_in_the_graph_decide(lowering: str) -> None:
    twin = assert_as_eager(Net(), torch.randn(4, 8), lowering=lowering)
    (graph,) = fxamp.report(twin).graphs
    assert graph.ops_by_dtype == {"bf16": 1, "f16": 2, "f32": graph.ops - 3}
    assert "torch.bfloat16, torch.float16; nothing is cast outside" in graph.chosen


class Wrapped(Plain):
    """As frameworks wrap a model: its forward is the region."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Exact(nn.Module):
    """torch's compiled backward runs the products of the inner region in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            return x @ self.weight


class Current(nn.Module):
    """A region without a dtype has that of the region around it, on or off; at the outermost level the thread's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=False):
            x = self.layers[0](x)
            with torch.autocast("cpu"):
                x = self.layers[1](x)
        with torch.autocast("cpu"):
            return self.layers[2](x)


class InCheckpoint(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, x, use_reentrant=False))

    def inner(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.first(x).relu().float()


class AroundCheckpoint(Plain):
    """The checkpoint's body is valid only in the region around it: Dynamo captured its dtype there."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(self.inner, x, use_reentrant=False)

    def inner(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        rows = torch.zeros(hidden.shape, dtype=torch.int64)
        return self.last(torch.zeros_like(hidden).scatter_add(0, rows, x.to(hidden.dtype)))


class Siblings(nn.Module):
    """Eager autocast casts a weight once for each outermost region, and sums the gradients of the casts in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                x = (x.float() @ self.weight) @ self.weight
        return x


@pytest.mark.parametrize(
    "kind", exhaustive([Wrapped, Exact, Current, InCheckpoint, AroundCheckpoint, Siblings], [Current, AroundCheckpoint])
)
@LOWERINGS
def test_regions_of_all_kinds(kind: type[nn.Module], lowering: str) -> None:
    twin = assert_as_eager(kind(), torch.randn(4, 16 if kind is Exact else 8), lowering=lowering)
    assert "torch.autocast in it" in fxamp.report(twin).graphs[0].chosen


@LOWERINGS
def test_a_region_without_a_dtype_follows_the_default(lowering: str) -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu"):
                return self.linear(x)

    net, x, usual = Region(), torch.ones(2, 4), torch.get_autocast_dtype("cpu")
    compiled = torch.compile(net, backend="fxamp", options={"lowering": lowering})
    try:
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            torch.set_autocast_dtype("cpu", dtype)
            assert torch.equal(compiled(x), net(x)) and net(x).dtype is dtype
    finally:
        torch.set_autocast_dtype("cpu", usual)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_a_region_of_a_dtype_that_the_device_lacks_is_off() -> None:
    class Float32(Plain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.first(x)
                with torch.autocast("cpu", torch.float32):
                    return self.last(x.float())

    assert_as_eager(Float32(), torch.randn(4, 8))


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_regions_that_do_not_concern_the_graph_are_not_followed(cpu: str) -> None:
    """A region that is off, or one of another device: "auto" decides for what is outside, as without them."""

    class Others(Plain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                x = self.first(x)
            with torch.autocast("cuda", torch.float16):
                return self.last(x)

    twin = compiled(Others())
    twin(torch.randn(4, 8))
    assert policies(twin) == [{"plain": "float32", "bfloat16": "cpu-bfloat16"}[cpu]]


def test_a_whole_step_with_a_scaler() -> None:
    """The loss, outside of the region, is computed in float32 from float16 results."""
    model = Plain()
    results = []
    for backend in (None, "fxamp"):
        twin = copy.deepcopy(model)
        scaler = (fxamp if backend else torch.amp).GradScaler("cpu", init_scale=2.0**8)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)

        def loss_of(x: Tensor, twin: nn.Module = twin) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                out = twin(x / 100)
            return (out.float() @ out.float().t()).mean()

        step = loss_of
        if backend:
            step = torch.compile(loss_of, backend=backend, options={"lowering": "aot_eager", "scaler": scaler})
        loss = step(torch.ones(4, 8))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        results.append([loss.detach(), *(parameter.grad for parameter in twin.parameters())])
    assert policies(step) == ["cpu-float16"]
    (graph,) = fxamp.report(step).graphs
    assert "nothing is cast outside" in graph.chosen
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-10, atol=0)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_regions_of_a_gpu_without_a_gpu() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", torch.float16):
            inside = x @ w
            with torch.autocast("cuda", enabled=False):
                exact = inside.float() @ w
        return inside, exact @ w

    with torch._subclasses.FakeTensorMode():
        x, w = torch.empty(4, 4, device="cuda"), torch.empty(4, 4, device="cuda")
    graph = fxamp.rewrite(program, (x, w), policy="auto").graph
    dtypes = [
        node.meta["val"].dtype for node in graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default)
    ]
    assert dtypes == [torch.float16, torch.float32, torch.float32]


def test_rewrite_follows_regions() -> None:
    model, x = Net(), torch.randn(4, 8)
    assert torch.equal(fxamp.rewrite(model, (x,), policy="auto")(x), model(x))


def train(model: Callable[[Tensor], Tensor], scaler: fxamp.GradScaler | None = None) -> None:
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(4, 8)).float().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()


@each_once("scaled, gradients", [True, False], [True, False])
def test_an_evaluation_outside_of_autocast_casts_nothing(
    scaled: bool, gradients: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scaler = fxamp.GradScaler("cpu", init_scale=8.0)
    model, x = compiled(Plain(), **({"scaler": scaler} if scaled else {})), 10 * torch.randn(4, 8)
    train(model, scaler if scaled else None)
    expected = model.last(model.first(x).square() * 1e4)
    with torch.set_grad_enabled(gradients):
        assert torch.equal(model(x), expected)
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(model(x), expected)
    assert policies(model) == ["cpu-float16", "float32"]
    assert "which is off here" in fxamp.report(model).graphs[1].chosen
    assert "nothing in it is cast" not in caplog.text


def test_an_evaluation_before_the_training_is_decided_again_after_it(cpu: str) -> None:
    model, x = compiled(Plain()), torch.randn(4, 8)
    model(x)
    train(model)
    assert torch.equal(model(x), model.last(model.first(x).square() * 1e4))
    assert policies(model)[0] == {"plain": "float32", "bfloat16": "cpu-bfloat16"}[cpu]
    assert policies(model)[-1] == "float32"


def test_models_of_one_class_follow_each_for_itself(cpu: str) -> None:
    """Dynamo compiles code, and uses the graphs of one model for the other."""
    follows, says_nothing, x = compiled(Plain()), compiled(Plain()), torch.randn(4, 8)
    train(follows)
    for _ in range(2):
        assert torch.equal(follows(x), follows.last(follows.first(x).square() * 1e4))
        exact = says_nothing.last(says_nothing.first(x).square() * 1e4)
        assert torch.equal(says_nothing(x), exact) == (cpu == "plain")


def test_a_function_follows_the_model_that_it_calls() -> None:
    """Two compiled functions read the same parameters; one of them has a region."""
    model, x = Plain(), torch.randn(4, 8)

    def trains(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    def evaluates(x: Tensor) -> Tensor:
        return model(x) * 1

    options = {"lowering": "aot_eager"}
    before = torch.compile(evaluates, backend="fxamp", options=options)
    before(x)
    torch.compile(trains, backend="fxamp", options=options)(x)
    assert torch.equal(before(x), evaluates(x))

    def evaluates_too(x: Tensor) -> Tensor:
        return model(x) * 1

    assert torch.equal(torch.compile(evaluates_too, backend="fxamp", options=options)(x), evaluates(x))


def test_a_reset_of_dynamo_forgets_autocast() -> None:
    model, x = compiled(Plain(), scaler=fxamp.GradScaler("cpu")), torch.randn(4, 8)
    train(model)
    torch._dynamo.reset()
    model(x)
    assert policies(model) == ["cpu-float16", "cpu-float16"]
    assert fxamp.report(model).graphs[1].chosen == "there is a scaler"


@pytest.mark.parametrize("autocast_off", [True, False])
def test_autocast_that_is_off_means_no_casts(autocast_off: bool, cpu: str) -> None:
    """``torch.autocast(enabled=use_amp)`` counts as autocast, even if it was never on."""
    model, x = compiled(Plain(), scaler=fxamp.GradScaler("cpu")), torch.randn(4, 8)
    with torch.autocast("cpu", enabled=False) if autocast_off else torch.no_grad():
        model(x)
    expected = {"plain": "float32", "bfloat16": "cpu-bfloat16"}[cpu]
    assert policies(model) == ["float32" if autocast_off else expected]


def test_other_graphs_of_a_program_with_regions_cast_nothing() -> None:
    """From the second call on: when the first graph is compiled, the region is not known yet."""

    class Breaks(Plain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            with torch.autocast("cpu", torch.bfloat16):
                x = x @ x.t()
                torch._dynamo.graph_break()
                x = x @ x
            torch._dynamo.graph_break()
            return self.last(x.float() @ x.float())

    model, x = Breaks(), torch.randn(8, 8)
    twin = compiled(model)
    twin(x)
    assert torch.equal(twin(x), model(x))


def test_a_scaler_alone_implies_float16_while_gradients_are_on(cpu: str) -> None:
    model, x = compiled(Plain(), scaler=fxamp.GradScaler("cpu")), torch.randn(4, 8)
    model(x)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    assert policies(model)[0] == "cpu-float16"
    assert set(policies(model)[1:]) == {{"plain": "float32", "bfloat16": "cpu-bfloat16"}[cpu]}


def test_a_reentrant_checkpoint_runs_as_its_backward_does() -> None:
    """It runs the forward without gradients, and again with them; an evaluation in between is no training."""
    scaler = fxamp.GradScaler("cpu")
    model, x = compiled(Plain(), "eager", scaler=scaler), torch.randn(4, 8, requires_grad=True)
    for _ in range(2):
        first = checkpoint(model, x, use_reentrant=True)
        with torch.no_grad():
            evaluated = model(x)
        assert torch.equal(first, model(x))
        assert not torch.equal(first, evaluated)


def test_the_log_names_the_graph_that_runs_in_float32(cpu: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = compiled(Plain(), scaler=fxamp.GradScaler("cpu")), torch.randn(4, 8)
    with caplog.at_level(logging.WARNING):
        model(x)
        assert "in it is cast" not in caplog.text
        with torch.no_grad():
            model(x)
            model(torch.randn(2, 8))
    warnings = [message for message in caplog.messages if "nothing in it is cast" in message]
    assert len(warnings) == (cpu == "plain")
    assert all(f"({__file__}:" in message for message in warnings)
