"""Dynamo skips a function of a model: the log says so once, in the first forward, and reports give the reason."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from breaking_loops import REASON, Loops, loops
from support.checks.exhaustive import exhaustive
from support.programs.small_models import Layer, Wrapped
from torch import Tensor, nn

import fxamp
from fxamp.policy.model.comparisons import holds

OPTIONS = {"policy": "cpu-bfloat16", "lowering": "aot_eager"}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0])


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x, self.head.weight.t()) if x.layout is torch.sparse_coo else self.head(x)


class Outer(Wrapped):
    """Nothing of the outer function is left to compile either."""

    def __init__(self) -> None:
        super().__init__(Loops())


class Blocks(nn.Module):
    """The skipped function calls one that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Layer(8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.block(x)
            torch._dynamo.graph_break()
        return x


def sparse() -> Tensor:
    return torch.eye(8).to_sparse()


CASES: dict[type[nn.Module], tuple[Callable[[], Tensor], str]] = {
    Recurrent: (lambda: torch.randn(2, 3, 8), "Attempted to wrap RNN, GRU, or LSTM: "),
    Graph: (sparse, "Attempted to wrap sparse Tensor: torch.compile does not support sparse Tensors"),
    Loops: (lambda: torch.randn(2, 8), REASON),
    Outer: (lambda: torch.randn(2, 8), REASON),
    Blocks: (lambda: torch.randn(2, 8), REASON),
}

if holds(">=2.15", torch.__version__):  # it ends the graph at such a layer
    del CASES[Recurrent]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def train(model: Callable[[Tensor], Tensor], x: Tensor, scaler: fxamp.GradScaler | None, weights: nn.Module) -> None:
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(x).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("kind", exhaustive(CASES, always=[*CASES][::3]))
@pytest.mark.parametrize("scaled", exhaustive([False, True], always=[False]))
def test_the_reason_is_logged_once(kind: type[nn.Module], scaled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Twice for two models: Dynamo forgets its reasons in a reset, fxamp does not."""
    make, reason = CASES[kind]
    where = Loops if kind is Outer else kind
    for number in range(2):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        scaler = fxamp.GradScaler("cpu") if scaled else None
        model = kind()
        model.compile(backend="fxamp", options={**OPTIONS, **({"scaler": scaler} if scaled else {})})
        train(model, make(), scaler, model)
        assert len(logged(caplog)) == number + 1
        code = where.forward.__code__
        line = f"{code.co_filename}:{code.co_firstlineno}: forward: {reason}"
        assert logged(caplog)[-1].startswith(
            f"{kind.__name__} is compiled with fxamp, but Dynamo skips one of its functions"
        )
        assert line in logged(caplog)[-1] and line in str(fxamp.report(model))
        assert "never called" not in caplog.text and "Either it has not been called yet" not in str(fxamp.report(model))
        assert bool(fxamp.report(model).graphs) == (kind is Blocks)


def test_it_is_logged_in_the_first_forward(caplog: pytest.LogCaptureFixture) -> None:
    torch.compile(Loops(), backend="fxamp", options=OPTIONS)(torch.randn(2, 8))
    assert len(logged(caplog)) == 1


def test_a_function_that_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(loops, backend="fxamp", options=OPTIONS)
    compiled(torch.ones(4, 4))
    (message,) = logged(caplog)
    assert "loops is compiled with fxamp" in message and f": loops: {REASON}" in message
    (skipped,) = fxamp.report(compiled).skipped
    assert skipped in message and "breaking_loops.py:" in skipped
    report = fxamp.report(compiled)
    assert str(report).startswith("0 graphs: fxamp compiled none of it.\n")
    both = str(replace(report, limited=("f.py:1: f",)))
    assert skipped in both and "  f.py:1: f" in both


def test_what_is_skipped_after_a_graph_break_is_reported() -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x @ x
            torch._dynamo.graph_break()
            for _ in range(2):
                torch._dynamo.graph_break()
            return x + 1

    model, other = Late(), Loops()
    for one in (model, other):
        one.compile(backend="fxamp", options=OPTIONS)
        one(torch.ones(8, 8))
    (skipped,) = fxamp.report(model).skipped
    assert f"torch_dynamo_resume_in_forward_at_{Late.forward.__code__.co_firstlineno + 2}: {REASON}" in skipped
    (skipped,) = fxamp.report(other).skipped
    assert "breaking_loops.py:" in skipped


def test_the_report_of_another_model_of_the_class_knows_it_too() -> None:
    """Dynamo does not try a second time to compile what it skips."""
    for _ in range(2):
        model = Recurrent()
        model.compile(backend="fxamp", options=OPTIONS)
        model(torch.randn(2, 3, 8))
        assert "Dynamo does not support RNN, GRU, or LSTM." in str(fxamp.report(model))


def test_a_reason_that_no_longer_holds_is_forgotten() -> None:
    model = Graph()
    model.compile(backend="fxamp", options=OPTIONS)
    model(sparse())
    assert fxamp.report(model).skipped
    torch._dynamo.reset()
    model(torch.randn(2, 8))
    assert fxamp.report(model).graphs and not fxamp.report(model).skipped


@pytest.mark.parametrize("backend", ["eager", "fxamp"])
def test_nothing_is_logged_of_other_backends_and_of_models_that_are_compiled(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Recurrent() if backend == "eager" else Layer(8)
    model.compile(backend=backend, **({} if backend == "eager" else {"options": OPTIONS}))
    train(model, torch.randn(2, 3, 8), None, model)
    assert logged(caplog) == []


def test_a_whole_graph_that_raises_is_no_skip(caplog: pytest.LogCaptureFixture) -> None:
    model = Recurrent()
    model.compile(backend="fxamp", options=OPTIONS, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(torch.randn(2, 3, 8))
    assert logged(caplog) == []


class BeforeATry(nn.Module):
    """Dynamo compiles the first layer, and cannot resume after the break within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = hidden + 1
        try:
            print(end="")
        finally:
            hidden = hidden * 2
        return self.second(hidden)


class BeforeALayer(nn.Module):
    """Dynamo compiles the first layer, and cannot resume after the break at a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cells, self.head = nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        hidden, _ = self.cells(hidden)
        return self.head(hidden)


class BeforeAPrint(BeforeATry):
    """Dynamo resumes after the break."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        print(end="")
        return self.second(hidden)


RESTS = [BeforeATry] if holds(">=2.15", torch.__version__) else [BeforeATry, BeforeALayer]


@pytest.mark.parametrize("kind", RESTS)
def test_the_rest_of_a_function_that_dynamo_leaves_is_logged_once(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = kind(), torch.randn(2, 3, 8)
    model.compile(backend="fxamp", options=OPTIONS)
    for _ in range(2):
        model(x)

    (message,) = logged(caplog)
    (ended,) = fxamp.report(model).breaks
    assert message.startswith(
        f"{kind.__name__} is compiled with fxamp, but after a graph break Dynamo does not compile the rest"
    )
    assert message.endswith(ended) and ended.endswith("; Dynamo leaves the rest of the function as it is written")
    assert fxamp.report(model).outside


def test_a_function_that_dynamo_resumes_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = BeforeAPrint()
    model.compile(backend="fxamp", options=OPTIONS)
    model(torch.randn(2, 8))
    assert logged(caplog) == [] and "the rest of the function" not in str(fxamp.report(model))
    assert fxamp.report(model).breaks and not fxamp.report(model).outside


@pytest.mark.parametrize("policy", ["auto", "cpu-bfloat16"])
def test_a_rest_that_runs_under_autocast_loses_no_casts(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    model = BeforeATry()
    model.compile(backend="fxamp", options={**OPTIONS, "policy": policy})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.randn(2, 8)).dtype == torch.bfloat16
    assert logged(caplog) == []
    assert fxamp.report(model).breaks[0].endswith("the rest of the function as it is written")
