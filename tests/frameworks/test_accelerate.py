"""fxamp.frameworks.accelerate compared with Accelerate's own mixed precision, in the same loop."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small import STEPS, assert_same, batches, net, weights
from support.checks.equality import assert_equal
from support.checks.exhaustive import exhaustive
from torch import Tensor, nn

import fxamp
from fxamp.tools.bench.host_syncs import HostReads

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402

from fxamp.frameworks.accelerate import prepare  # noqa: E402
from fxamp.optim import CompiledOptimizer  # noqa: E402

LOWERING = {"lowering": "aot_eager"}
POLICIES = {"bf16": "cpu-bfloat16", "fp16": "cpu-float16"}
RUNS = [("bf16", False), ("fp16", False), ("fp16", True)]
SCALE = 2.0**10

Prepare = Callable[..., tuple[Any, ...]]


@pytest.fixture(autouse=True)
def as_the_first_accelerator() -> Iterator[None]:
    yield
    reset()


def reset() -> None:
    """Accelerate keeps its state for the process, which may hold one kind of accelerator."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def accelerator(mixed_precision: str = "no") -> Any:
    reset()
    return accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=2)


def by_accelerate(dtype: str) -> tuple[Any, Prepare]:
    """Its own way; on a CPU it makes no scaler, so it is given what it makes on a GPU."""
    ours = accelerator("bf16")
    if dtype == "fp16":
        ours.state._mixed_precision = "fp16"
        ours.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    return ours, ours.prepare


def by_fxamp(dtype: str, **scaler: Any) -> tuple[Any, Prepare]:
    ours = accelerator()
    settings = {"scaler": {"init_scale": SCALE, **scaler}} if dtype == "fp16" else {}

    def prepared(*objects: Any) -> tuple[Any, ...]:
        return prepare(ours, *objects, policy=POLICIES[dtype], options=LOWERING, **settings)

    return ours, prepared


class Loop:
    """Accelerate's own documentation's loop: accumulation, clipping, a schedule."""

    def __init__(self, pair: tuple[Any, Prepare]) -> None:
        self.accelerator, prepared = pair
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.model, self.optimizer, self.schedule = prepared(model, optimizer, schedule)
        self.seen: list[float] = []

    def run(self, data: list[Any], counting: HostReads | None = None) -> "Loop":
        for x, target in data:
            with self.accelerator.accumulate(self.model):
                loss = self.model(x, target)
                self.accelerator.backward(loss)
                self.seen.append(loss.item())
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                    self.seen.append(norm.item())
                with counting or torch.no_grad():
                    self.optimizer.step()
                    self.schedule.step()
                self.optimizer.zero_grad()
        self.seen.append(self.schedule.get_last_lr()[0])
        with torch.no_grad():
            self.seen.append(self.model.eval()(*data[0]).item())
        self.model.train()
        return self

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return weights(self.accelerator.unwrap_model(self.model))


@pytest.mark.parametrize("run", exhaustive(RUNS, always=[("fp16", True)]))
def test_training_is_that_under_accelerates_own_mixed_precision(run: tuple[str, bool]) -> None:
    dtype, loud = run
    data = batches(loud) * 2

    theirs = Loop(by_accelerate(dtype)).run(data)
    ours = Loop(by_fxamp(dtype)).run(data)

    assert_equal(ours.seen, theirs.seen, equal_nan=True)
    assert_same(ours.weights, theirs.weights)
    assert len(fxamp.report(ours.model).graphs) > 0
    if dtype == "fp16":
        assert ours.accelerator.scaler.loss_scale == theirs.accelerator.scaler.get_scale()
        assert ours.accelerator.scaler.skipped_steps == (2 if loud else 0)
        assert ours.schedule.get_last_lr() == [0.1 * 0.5 ** (STEPS - (2 if loud else 0))]


def test_auto_follows_what_accelerate_wraps_the_forward_in(caplog: pytest.LogCaptureFixture) -> None:
    """On any CPU: the region is inside of the graph, and the evaluation in it too."""
    engine = accelerator("bf16")
    ours = Loop((engine, partial(prepare, engine, options=LOWERING))).run(batches())
    theirs = Loop(by_accelerate("bf16")).run(batches())

    assert ours.seen == theirs.seen
    assert not [record for record in caplog.records if record.name.startswith("fxamp")]
    assert_same(ours.weights, theirs.weights)
    graphs = fxamp.report(ours.model).graphs
    assert graphs and all("torch.autocast in it: torch.bfloat16" in graph.chosen for graph in graphs)


def test_the_device_skips_and_the_schedule_follows() -> None:
    counting = HostReads()
    host = Loop(by_fxamp("fp16")).run(batches(loud=True) * 2)

    device = Loop(by_fxamp("fp16", skip="device", step_lowering="aot_eager"))
    device.run(batches()[:2]).run(batches(loud=True)[2:] + batches(loud=True), counting)

    assert counting.count == 0
    assert device.accelerator.scaler.skipped_steps == host.accelerator.scaler.skipped_steps == 2
    assert device.schedule.get_last_lr() == host.schedule.get_last_lr()
    torch.testing.assert_close(device.weights, host.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", [by_accelerate, by_fxamp])
def test_a_compiled_optimizer_steps_inside_of_accelerates(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Accelerate's own mixed precision, and under fxamp's: its wrapper calls the step that is compiled."""
    eager = Loop(way("bf16")).run(batches())
    real = torch.optim.AdamW
    compiled: list[torch.optim.Optimizer] = []

    def fused_adamw(*args: Any, **named: Any) -> torch.optim.Optimizer:
        compiled.append(fxamp.compile_optimizer(real(*args, **named), lowering="aot_eager"))
        return compiled[0]

    monkeypatch.setattr(torch.optim, "AdamW", fused_adamw)
    ours = Loop(way("bf16")).run(batches())

    assert CompiledOptimizer.of(compiled[0]).compilations == 1
    assert not CompiledOptimizer.of(compiled[0]).reasons
    torch.testing.assert_close(ours.weights, eager.weights, rtol=1e-5, atol=1e-6)
    assert ours.schedule.get_last_lr() == eager.schedule.get_last_lr()


@pytest.mark.exhaustive
def test_training_resumes_from_a_saved_state(tmp_path: Path) -> None:
    data = batches(loud=True)
    first = Loop(by_fxamp("fp16")).run(data)
    first.accelerator.save_state(str(tmp_path))
    whole = first.run(data)

    again = Loop(by_fxamp("fp16", growth_interval=7))
    again.accelerator.load_state(str(tmp_path))
    again.run(data)

    assert_same(again.weights, whole.weights)
    assert list(again.weights) == list(net().state_dict())
    assert again.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    assert_equal(again.seen, whole.seen[len(again.seen) :], equal_nan=True)


def test_a_model_without_a_graph_that_runs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Net(nn.Linear):
        def another_method(self, x: Tensor) -> Tensor:
            return self.forward(x)

    model = Net(2, 2)
    model, optimizer = prepare(
        accelerate.Accelerator(cpu=True), model, torch.optim.SGD(model.parameters(), lr=0.1), policy="cpu-float16"
    )

    model.another_method(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    assert "Net is compiled with fxamp, but none of its graphs" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scaler": 2.0}, "scaler=2.0, of type builtins.float"),
        ({"options": {"policy": "auto"}}, "options contains 'policy'"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "of type torch.amp.grad_scaler.GradScaler"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(fxamp.FxampError, match=message):
        prepare(accelerator(), net(), **arguments)


def test_two_scalers_are_refused() -> None:
    ours = accelerator()
    ours.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(fxamp.FxampError, match="has a scaler already, GradScaler"):
        prepare(ours, net(), policy="cpu-float16")
    ours.state._mixed_precision = "fp16"
    with pytest.raises(fxamp.FxampError, match="scales losses itself"):
        prepare(ours, net(), policy="cpu-float16")


def retried(pair: tuple[Any, Prepare]) -> Loop:
    """The second run, after a first that ran out of memory, as with Accelerate's find_executable_batch_size."""
    tries: list[int] = []

    @accelerate.utils.find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> Loop:
        tries.append(batch_size)
        pair[0].free_memory()
        loop, data = Loop(pair), batches(loud=True)
        if batch_size == 1:
            return loop.run(data * 2)
        with pair[0].accumulate(loop.model):
            pair[0].backward(loop.model(*data[3]))
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    loop: Loop = train()
    assert tries == [2, 1]
    return loop


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", POLICIES)
def test_after_free_memory_it_prepares_again(dtype: str) -> None:
    """An overflow of the run that ended is none of the next run's."""
    theirs, ours = retried(by_accelerate(dtype)), retried(by_fxamp(dtype))
    assert_equal(ours.seen, theirs.seen, equal_nan=True)
    assert_same(ours.weights, theirs.weights)
    if dtype == "fp16":
        assert ours.accelerator.scaler.loss_scale == theirs.accelerator.scaler.get_scale()
        assert ours.accelerator.scaler.skipped_steps == 2


@pytest.mark.exhaustive
def test_after_free_memory_the_scaler_is_that_of_the_new_arguments() -> None:
    ours = accelerator()
    prepare(ours, net(), policy="cpu-float16", options=LOWERING, scaler={"init_scale": 4.0})
    before = ours.scaler
    with pytest.raises(fxamp.FxampError, match=r"has a scaler already.* again after accelerator.free_memory"):
        prepare(ours, net(), policy="cpu-float16")
    assert ours.scaler is before
    ours.free_memory()
    prepare(ours, net(), policy="cpu-float16", options=LOWERING, scaler={"init_scale": 8.0})
    assert ours.scaler is not before and ours.scaler.loss_scale == 8.0
    ours.free_memory()
    prepare(ours, net(), policy="cpu-bfloat16", options=LOWERING)
    assert ours.scaler is None
    prepare(ours, net(), policy="cpu-float16", options=LOWERING)
    ours.free_memory()
    ours.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(fxamp.FxampError, match="has a scaler already, GradScaler"):
        prepare(ours, net(), policy="cpu-float16")
