"""Training that is saved, loaded and continued equals the uninterrupted one bit for bit, however it rounds."""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once, exhaustive
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import fxamp
from fxamp.kernels import Implementation, forced
from fxamp.optim import CompiledOptimizer
from fxamp.passes.step.pack_state import COUNT
from fxamp.policy import Policy

SHAPES = ((9, 40), (300,), (1,))
INF = float("inf")
TABLES = {
    "bfloat16": 'state = "bfloat16"\nrounding = "stochastic"',
    "8bit": 'state = "8bit"\nrounding = "stochastic"',
    "8 bits and compensated": 'state = "float8_e4m3fn"\nrounding = "stochastic"\nweights = "kahan"',
    "weights alone": 'rounding = "stochastic"',
    "nearest": 'state = "8bit"',
}
MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda own: torch.optim.AdamW(own, lr=1e-2),
    "SGD": lambda own: torch.optim.SGD(own, lr=1e-2),
    "momentum": lambda own: torch.optim.SGD(own, lr=1e-2, momentum=0.9),
}


@dataclass
class Run:
    """A training of given gradients. ``scaled``: a scaler skips on the device, else step() itself is compiled."""

    table: str
    make: str = "AdamW"
    dtype: torch.dtype = torch.float32
    scaled: bool = False
    lowering: str = "aot_eager"
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        own = [torch.randn(shape, generator=generator).to(self.dtype) for shape in SHAPES]
        self.parameters = [nn.Parameter(value) for value in own]
        self.optimizer = MAKES[self.make](self.parameters)
        policy = Policy.loads(f'extends = ["cpu-bfloat16"]\n[optimizer]\n{TABLES[self.table]}\n')
        fxamp.compile_optimizer(self.optimizer, policy, lowering=self.lowering, seed=self.seed)
        self.scaler = fxamp.GradScaler("cpu", 8.0, enabled=self.scaled, skip="device", step_lowering=self.lowering)
        self.scaler.scale(torch.zeros(()))

    def step(self, at: int, overflow: bool = False, closure: bool = False) -> None:
        """``closure``: a call that only the host can make, so the step is not compiled."""
        generator = torch.Generator().manual_seed(100 + at)
        scale = self.scaler.get_scale()
        for parameter in self.parameters:
            parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(self.dtype)
        if overflow and self.scaled:
            self.parameters[0].grad.view(-1)[3] = INF  # type: ignore[union-attr]
        arguments = [lambda: torch.ones(())] if closure else []
        self.scaler.step(self.optimizer, *arguments)
        self.scaler.update()

    def restarted(self) -> "Run":
        """What another process makes of the files that this one saves."""
        other, stream = Run(self.table, self.make, self.dtype, self.scaled, self.lowering, self.seed), io.BytesIO()
        torch.save([self.parameters, self.optimizer.state_dict(), self.scaler.state_dict()], stream)
        stream.seek(0)
        parameters, state, scaler = torch.load(stream)
        with torch.no_grad():
            for own, saved in zip(other.parameters, parameters, strict=True):
                own.copy_(saved)
        other.optimizer.load_state_dict(state)
        other.scaler.load_state_dict(scaler)
        return other

    def bits(self) -> list[Tensor]:
        saved = self.optimizer.state_dict()["state"].values()
        return [*map(Tensor.detach, self.parameters), *(torch.as_tensor(v) for entry in saved for v in entry.values())]


steps = st.lists(st.sampled_from(["step", "step", "overflow", "closure", "restart"]), min_size=2, max_size=7)


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from([*TABLES]),
    st.sampled_from([*MAKES]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    steps,
)
@pytest.mark.exhaustive
def test_any_restart_continues_bit_for_bit(
    table: str, make: str, dtype: torch.dtype, scaled: bool, program: list[str]
) -> None:
    restarted, whole = Run(table, make, dtype, scaled), Run(table, make, dtype, scaled)
    for at, call in enumerate([*program, "restart", "step", "step"]):
        if call == "restart":
            restarted = restarted.restarted()
            continue
        for run in (restarted, whole):
            run.step(at, overflow=call == "overflow", closure=call == "closure" and not scaled)
        assert_equal(restarted.bits(), whole.bits())


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["kernel", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_restart_of_generated_code_continues_bit_for_bit(how: str) -> None:
    with forced(Implementation.INTERPRETER if how == "kernel" else None):
        run = Run("8bit", scaled=True, lowering="inductor")
        for at in range(3):
            run.step(at, overflow=at == 1)
        other = run.restarted()
        for training in (run, other):
            training.step(3)
            training.step(4)
        assert_equal(run.bits(), other.bits())


@each_once(
    "table, dtype, flat", exhaustive(TABLES, always=list(TABLES)[::2]), [torch.float32, torch.bfloat16], [False, True]
)
def test_a_distributed_checkpoint_continues_bit_for_bit(
    table: str, dtype: torch.dtype, flat: bool, tmp_path: Path
) -> None:
    """It loads only what a new optimizer has after one step, which is the optimizer's own."""
    runs, options = [Run(table, dtype=dtype) for _ in range(2)], StateDictOptions(flatten_optimizer_state_dict=flat)
    models = [nn.ParameterList(run.parameters) for run in runs]
    for at in range(3):
        runs[0].step(at)
    saved, loaded = (
        dict(zip(("model", "optimizer"), get_state_dict(model, run.optimizer, options=options), strict=True))
        for model, run in zip(models, runs, strict=True)
    )
    dcp.save(saved, checkpoint_id=tmp_path)
    dcp.load(loaded, checkpoint_id=tmp_path)
    own = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizer"]}
    set_state_dict(models[1], runs[1].optimizer, **own, options=options)
    for at in range(3, 6):
        for run in runs:
            run.step(at)
        assert_equal(*(run.bits() for run in runs))


def counts(run: Run) -> list[int]:
    return [int(entry[COUNT]) for entry in run.optimizer.state_dict()["state"].values()]


def test_only_steps_that_are_taken_count() -> None:
    run = Run("bfloat16", scaled=True)
    for at in range(5):  # the first one is the host's, which rounds nothing
        run.step(at, overflow=at in (2, 3))
    assert counts(run) == [2, 2, 2]
    assert all(type(entry[COUNT]) is int for entry in run.optimizer.state_dict()["state"].values())


def test_a_state_that_was_saved_without_the_count_loads_and_starts_to_count() -> None:
    run = Run("bfloat16")
    run.step(0)
    run.step(1)
    state = copy.deepcopy(run.optimizer.state_dict())
    for entry in state["state"].values():
        del entry[COUNT]
    run.optimizer.load_state_dict(state)
    run.step(2)
    assert counts(run) == [1, 1, 1] and not CompiledOptimizer.of(run.optimizer).reasons


def test_a_state_with_the_count_loads_into_an_ordinary_optimizer_and_comes_back() -> None:
    run = Run("8bit")
    run.step(0)
    run.step(1)
    plain = [nn.Parameter(parameter.detach().clone()) for parameter in run.parameters]
    optimizer = torch.optim.AdamW(plain, lr=1e-2)
    optimizer.load_state_dict(run.optimizer.state_dict())
    for parameter in plain:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    run.optimizer.load_state_dict(optimizer.state_dict())
    run.step(2)
    assert counts(run) == [2, 2, 2]


def test_settings_that_change_between_steps_take_effect() -> None:
    """The same state, once rounded stochastically, with another seed, and to nearest."""
    results = []
    for table, seed in (("weights alone", 0), ("weights alone", 0), ("weights alone", 1), ("nearest", 0)):
        run = Run("weights alone", "SGD", torch.bfloat16)
        run.step(0)
        policy = Policy.loads(f'extends = ["cpu-bfloat16"]\n[optimizer]\n{TABLES[table]}\n')
        fxamp.compile_optimizer(run.optimizer, policy, lowering="aot_eager", seed=seed)
        run.step(1)
        run.step(2)
        results.append(run.parameters[0].detach().clone())
    assert torch.equal(results[0], results[1])
    assert not any(torch.equal(results[0], training) for training in results[2:]) and not torch.equal(
        results[2], results[3]
    )


def test_a_launch_that_is_replayed_with_its_arguments_draws_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CUDA graph replays it: the same kernel, on the same addresses, and nothing of the host's between."""
    from fxamp.kernels import interpreter

    launches: list[Callable[[], Any]] = []

    real = interpreter.Interpreted.__getitem__

    def recording(kernel: interpreter.Interpreted, grid: Any) -> Any:
        def recorded(*args: Any, **more: Any) -> None:
            launches.append(lambda: real(kernel, grid)(*args, **more))
            launches[-1]()

        return recorded

    monkeypatch.setattr(interpreter.Interpreted, "__getitem__", recording)
    with forced(Implementation.INTERPRETER):
        run = Run("weights alone", "SGD", torch.bfloat16, lowering="inductor")
        run.step(0)
        launches.clear()
        before, results = [parameter.detach().clone() for parameter in run.parameters], []
        for replay in range(4):
            with torch.no_grad():
                for parameter, value in zip(run.parameters, before, strict=True):
                    parameter.copy_(value)
            if replay:
                for launch in tuple(launches):
                    launch()
            else:
                run.step(1)
            results.append(run.parameters[1].detach().clone())
    assert launches and counts(run) == [5, 5, 5]
    assert not any(torch.equal(a, b) for at, a in enumerate(results) for b in results[:at])
