"""Random programs of scale, backward, unscale_, clip, step and update leave both scalers in the same state."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracles.side_by_side import SCALERS, Scaler, assert_same, outcome

OPTIMIZERS = 3
BAD = (float("inf"), float("-inf"), float("nan"))


@dataclass
class World:
    """A scaler with three optimizers: one decided on the host, two fused that decide on the device."""

    scaler: Scaler
    parameters: list[list[torch.Tensor]] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(OPTIMIZERS):
            shapes = ((3,), (2, 2), ())
            self.parameters.append([torch.randn(s, generator=generator).requires_grad_() for s in shapes])
        sgd, adamw, adagrad = self.parameters
        self.optimizers = [
            torch.optim.SGD(sgd, lr=0.1, momentum=0.9),
            torch.optim.AdamW(adamw, lr=0.1, fused=True),
            torch.optim.Adagrad([{"params": adagrad[:2]}, {"params": adagrad[2:], "lr": 0.01}], lr=0.1, fused=True),
        ]
        # The first step of a fused optimizer is where fxamp departs from torch; see test_scaler_first_step.py.
        for optimizer, parameters in zip(self.optimizers, self.parameters, strict=True):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()

    def backward(self, which: int, unused: int) -> None:
        used = [p for i, p in enumerate(self.parameters[which]) if i != unused]
        self.scaler.scale(torch.stack([p.square().sum() for p in used]).sum()).backward()

    def inject(self, which: int, place: int, value: float) -> None:
        gradient = self.parameters[which][place].grad
        if gradient is not None:
            gradient.view(-1)[-1] = value

    def clip(self, which: int) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters[which], 0.5)

    def run(self, command: tuple[Any, ...]) -> Any:
        name, *arguments = command
        if name in ("backward", "inject", "clip"):
            return getattr(self, name)(*arguments)
        if name in ("unscale_", "step"):
            return getattr(self.scaler, name)(self.optimizers[arguments[0]])
        if name == "zero_grad":
            return self.optimizers[arguments[0]].zero_grad(set_to_none=arguments[1])
        return getattr(self.scaler, name)(*arguments)

    def state(self) -> Any:
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        gradients = [[p.grad for p in parameters if p.grad is not None] for parameters in self.parameters]
        return self.scaler.state_dict(), self.parameters, gradients, states


which = st.integers(0, OPTIMIZERS - 1)
place = st.integers(0, 2)
commands = st.one_of(
    st.tuples(st.just("backward"), which, st.integers(0, 3)),
    st.tuples(st.just("inject"), which, place, st.sampled_from(BAD)),
    st.tuples(st.sampled_from(["unscale_", "step", "step", "clip"]), which),
    st.tuples(st.just("zero_grad"), which, st.booleans()),
    st.tuples(st.just("update")),
    st.tuples(st.just("update"), st.sampled_from([1.0, 1000.7, 4096.0])),
)


@pytest.mark.exhaustive
@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(st.lists(commands, min_size=5, max_size=40))
def test_any_program_does_the_same(program: list[tuple[Any, ...]]) -> None:
    worlds = [World(scaler("cpu", init_scale=2.0**14, growth_interval=2)) for scaler in SCALERS]
    for command in program:
        theirs, ours = [outcome(partial(world.run, command)) for world in worlds]
        assert_same(ours, theirs)
        assert_same(worlds[1].state(), worlds[0].state())


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sets(which), st.booleans(), st.integers(1, 3)), min_size=8, max_size=14))
def test_a_training_loop_does_the_same(iterations: list[tuple[set[int], bool, int]]) -> None:
    """Whole iterations, so that growth, back-off and several optimizers meet: (who overflows, clip, accumulated)."""
    worlds = [World(scaler("cpu", init_scale=1e4, growth_interval=2)) for scaler in SCALERS]
    for overflowing, clip, accumulated in iterations:
        for world in worlds:
            for i in range(OPTIMIZERS):
                world.optimizers[i].zero_grad()
                for _ in range(accumulated):
                    world.backward(i, unused=3)
                if i in overflowing:
                    world.inject(i, place=i, value=BAD[i])
                if clip:
                    world.scaler.unscale_(world.optimizers[i])
                    world.clip(i)
                world.scaler.step(world.optimizers[i])
            world.scaler.update()
        assert_same(worlds[1].state(), worlds[0].state())
