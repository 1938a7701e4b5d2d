"""What the library tells of its work to who asks for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest
import torch
from torch import nn

import fxamp
from fxamp.kernels import check_, check_unscale_
from fxamp.observe import CompiledStep, CompileStage, Event, GradientCheck, observed, observing


class Log:
    """An observer that notes beginnings and ends."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.open = 0

    @contextmanager
    def __call__(self, event: Event) -> Iterator[None]:
        self.events.append(event)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


def test_the_stages_of_compiling_one_graph_in_their_order() -> None:
    def square(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    compiled = torch.compile(square, backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": "eager"})
    with observing(log := Log()):
        compiled(torch.ones(2, 2))
        compiled(torch.ones(2, 2))
    assert log.events == [CompileStage("capture"), CompileStage("passes"), CompileStage("lowering")]


def test_checks_of_gradients_outside_of_graphs() -> None:
    gradients = [torch.ones(2), torch.full((3,), 2.0)]
    with observing(log := Log()):
        check_(gradients, torch.zeros(()))
        check_unscale_(gradients, torch.tensor(0.5), torch.zeros(()))
    seen = [(event.gradients, event.in_place) for event in log.events if isinstance(event, GradientCheck)]
    assert seen == [(gradients, False), (gradients, True)]


def test_calls_of_a_compiled_step() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = fxamp.GradScaler("cpu", skip="device", step_lowering="aot_eager")
    steps = []
    for _ in range(3):
        scaler.scale(parameter.sum()).backward()
        with observing(log := Log()):
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.append([event for event in log.events if isinstance(event, CompiledStep)])
    assert steps[-1] == [CompiledStep(None)]


def test_nothing_is_told_outside_and_all_of_it_to_every_observer() -> None:
    first, second = Log(), Log()
    with observing(first):
        with observing(second), observed(CompileStage("a")):
            assert (first.open, second.open) == (1, 1)
        with observed(CompileStage("b")):
            assert (first.open, second.open) == (1, 0)
    with observed(CompileStage("c")):
        assert first.open == 0
    assert [first.events, second.events] == [[CompileStage("a"), CompileStage("b")], [CompileStage("a")]]


def test_events_of_other_threads_are_seen() -> None:
    def work() -> None:
        with observed(CompileStage("elsewhere")):
            pass

    with observing(log := Log()):
        thread = Thread(target=work)
        thread.start()
        thread.join()
    assert log.events == [CompileStage("elsewhere")]


def test_work_that_fails_ends_and_its_error_goes_on() -> None:
    log = Log()
    with pytest.raises(ZeroDivisionError), observing(log), observed(CompileStage("a")):
        raise ZeroDivisionError
    with observed(CompileStage("b")):
        pass
    assert (log.events, log.open) == ([CompileStage("a")], 0)
