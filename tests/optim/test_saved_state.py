"""What ``state_dict`` of a compiled optimizer saves: torch's own numbers and tensors, all of one moment."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once
from support.programs.user_optimizers import Counting, EachParameter
from torch import Tensor, nn

import fxamp
from fxamp.optim import CompiledOptimizer, packed_state_dict
from fxamp.optim.packed_tensor import is_packed
from fxamp.optim.tracing.stand_ins import plain_step
from fxamp.policy import Policy


class Numbering(EachParameter):
    """Keeps numbers of its own besides a mean: ``count`` steps, and a ``decay`` that shrinks with each of them.

    ``anew``: its count is bound anew by each step, and not changed in place.
    """

    def __init__(self, parameters: Any, lr: float = 0.001, anew: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "anew": anew})

    def step_one(self, parameter: Any, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(count=0, decay=1.0, mean=torch.zeros_like(parameter), constant=3)
        if group["anew"]:
            state["count"] = state["count"] + 1
        else:
            state["count"] += 1
        state["decay"] *= 0.99
        state["mean"].lerp_(parameter.grad, 0.1)
        parameter.add_(state["mean"] / (1 - state["decay"]), alpha=-group["lr"])


class CountingInState(torch.optim.Optimizer):
    """Counts its steps in a tensor at ``state["k"]``, which is the entry of no parameter, as madgrad's MADGRAD does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.state.setdefault("k", torch.tensor([0])).add_(1)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
            parameter.sub_(self.state[parameter]["mean"] / self.state["k"])


NUMBERED: dict[str, Any] = {
    "in place": Numbering,
    "bound anew": lambda own: Numbering(own, anew=True),
    "named step": lambda own: Counting(own, lr=0.001),
}


def steps(optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def restarted(make: Any, dtype: torch.dtype, compiled: bool, closed: bool) -> tuple[list[Tensor], Any]:
    """Return the parameters of a training that is saved, loaded and continued, and its last state.

    ``closed``: its last step before it is saved is the optimizer's own.
    """
    optimizers, parameter = [], nn.Parameter(torch.ones(3, dtype=dtype))
    for at in range(2):
        optimizer = make([parameter])
        if compiled:
            fxamp.compile_optimizer(optimizer, lowering="aot_eager")
        if at:
            file = io.BytesIO()
            torch.save(optimizers[-1].state_dict(), file)
            file.seek(0)
            optimizer.load_state_dict(torch.load(file))
        optimizers.append(optimizer)
        steps(optimizer, 270)
        assert not compiled or CompiledOptimizer.of(optimizer).compilations
        if closed:
            plain = make([parameter])
            plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            steps(plain, 1)
            optimizer.load_state_dict(plain.state_dict())
    (entry,) = optimizers[-1].state_dict()["state"].values()
    return [parameter.detach()], entry


@each_once("make, dtype, closed", NUMBERED, (torch.bfloat16, torch.float32), (False, True))
def test_numbers_are_saved_as_numbers_and_count_on(make: str, dtype: torch.dtype, closed: bool) -> None:
    (ours, entry), (theirs, expected) = (restarted(NUMBERED[make], dtype, it, closed) for it in (True, False))
    assert {name: type(value) for name, value in entry.items()} == {n: type(v) for n, v in expected.items()}
    for name, value in expected.items():
        if isinstance(value, (int, float)):
            assert entry[name] == pytest.approx(value, rel=1e-5)
    tolerance = 2**-7 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_a_number_stays_one_after_a_step_of_the_optimizers_own() -> None:
    optimizer = fxamp.compile_optimizer(NUMBERED["bound anew"]([nn.Parameter(torch.ones(3))]), lowering="aot_eager")
    steps(optimizer, 4)
    plain_step(optimizer)(optimizer)
    (entry,) = optimizer.state_dict()["state"].values()
    assert type(entry["count"]) is int and entry["count"] == 5


PACKED = {
    "bfloat16": 'state = "bfloat16"',
    "8bit": 'state = "8bit"',
    "8bit stochastic": 'state = "8bit"\nrounding = "stochastic"',
    "one of two": 'state = { exp_avg = "8bit" }',
    "weights": 'rounding = "stochastic"',
}
ADAMS = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam, "NAdam": torch.optim.NAdam}


def packing(make: str, table: str) -> torch.optim.Optimizer:
    """Return an optimizer after three steps; of its parameters one is a single number, whose state is not packed."""
    dtype = torch.bfloat16 if table == "weights" else torch.float32
    own = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((300,), ())]
    optimizer: torch.optim.Optimizer = ADAMS[make](own, lr=0.01, foreach=False)
    policy = Policy.loads(f'extends = ["cpu-bfloat16"]\n[optimizer]\n{PACKED[table]}\n')
    fxamp.compile_optimizer(optimizer, policy, lowering="aot_eager")
    steps(optimizer, 3)
    return optimizer


def bits(saved: dict[str, Any]) -> list[Tensor]:
    values = [value for entry in saved["state"].values() for value in entry.values()]
    return [value.unpacked() if is_packed(value) else torch.as_tensor(value) for value in values]


@each_once("table, make, save", PACKED, ADAMS, [torch.optim.Optimizer.state_dict, packed_state_dict])
def test_what_is_saved_of_packed_state_is_of_one_moment(
    table: str, make: str, save: Callable[[torch.optim.Optimizer], dict[str, Any]]
) -> None:
    """It equals a copy that is made at once, also after steps and writes to the optimizer's state."""
    optimizer = packing(make, table)
    saved = save(optimizer)
    at_once = [value.clone() for value in bits(saved)]
    steps(optimizer, 4)
    for entry in optimizer.state.values():
        for value in entry.values():
            value.zero_()
    assert_equal(bits(saved), at_once)
    assert not any(map(torch.equal, bits(optimizer.state_dict()), at_once))


def test_what_is_saved_of_unpacked_state_follows_the_optimizer_as_torchs_does() -> None:
    saved = []
    for compiled in (True, False):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.01, foreach=False)
        if compiled:
            fxamp.compile_optimizer(optimizer, lowering="aot_eager")
        steps(optimizer, 3)
        saved.append(optimizer.state_dict())
        steps(optimizer, 4)
    for ours, theirs in zip(*map(bits, saved), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_numbers_and_tensors_are_of_one_moment() -> None:
    optimizer = fxamp.compile_optimizer(Numbering([nn.Parameter(torch.ones(3))]), lowering="aot_eager")
    steps(optimizer, 3)
    saved = optimizer.state_dict()
    at_once = copy.deepcopy(saved)
    steps(optimizer, 4)
    assert_equal(bits(saved), bits(at_once))


@pytest.mark.parametrize("save", [torch.optim.Optimizer.state_dict, packed_state_dict])
def test_saves_entries_that_are_no_dicts(save: Callable[[torch.optim.Optimizer], dict[str, Any]]) -> None:
    saved = []
    for compiled in (False, True):
        optimizer = CountingInState([nn.Parameter(torch.ones(3))])
        if compiled:
            fxamp.compile_optimizer(optimizer, lowering="aot_eager")
        steps(optimizer, 2)
        saved.append(save(optimizer))
        loaded = CountingInState([nn.Parameter(torch.ones(3))])
        loaded.load_state_dict(saved[-1])
        assert loaded.state["k"] == 2
    assert list(saved[0]["state"]) == list(saved[1]["state"])
    assert_equal(saved[1]["state"], saved[0]["state"])
