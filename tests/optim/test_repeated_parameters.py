"""Parameters that are twice in an optimizer's groups, or share memory, are stepped as torch steps them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once
from support.programs.user_optimizers import Counting
from torch import Tensor, nn

import fxamp
from fxamp.kernels.dispatch import Implementation, forced
from fxamp.optim import CompiledOptimizer

MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda own: torch.optim.SGD(own, lr=0.1),
    "momentum": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9),
    "AdamW": lambda own: torch.optim.AdamW(own, lr=0.01, foreach=False),
    "Adagrad": lambda own: torch.optim.Adagrad(own, lr=0.01, foreach=False),
    "fused AdamW": lambda own: torch.optim.AdamW(own, lr=0.01, fused=True),
    "a user's own": Counting,
}
PLACES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "one group": lambda first, second: [first, second, first],
    "two groups": lambda first, second: [{"params": [first, second]}, {"params": [nn.Parameter(torch.ones(2))]}],
    "later": lambda first, second: [first, second],
}


def stepped(make: str, place: str, compiled: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    own = [nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(2)]
    optimizer = MAKES[make](PLACES[place](*own))
    if place == "two groups":
        optimizer.param_groups[1]["params"].append(own[0])
    if compiled:
        fxamp.compile_optimizer(optimizer, lowering="aot_eager")
    for at in range(5):
        if place == "later" and at == 3:
            optimizer.param_groups[0]["params"].append(own[0])
        for parameter in own:
            parameter.grad = torch.randn(4, 3, generator=generator)
        optimizer.step()
    if compiled:
        (reason,) = CompiledOptimizer.of(optimizer).reasons
        assert reason.startswith("a parameter is in its groups twice")
        assert (CompiledOptimizer.of(optimizer).compilations > 0) == (place == "later")
    return [parameter.detach() for parameter in own]


@each_once("make, place", MAKES, PLACES)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_twice_in_the_groups_is_stepped_twice(make: str, place: str) -> None:
    torch.testing.assert_close(stepped(make, place, True), stepped(make, place, False))


SHARERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], tuple[int, ...]]] = {
    "one program": (lambda own: torch.optim.Muon(own, lr=0.1), (4, 3)),
    "no dimension": (lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, foreach=False), ()),
    "one kernel": (lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, foreach=False), (4, 3)),
}


#: What begins to share memory, and when.
SHARED: dict[str, Callable[[list[nn.Parameter], torch.optim.Optimizer, int], None]] = {
    "parameters": lambda own, optimizer, step: share(own[2], own[0]) if step == 0 else None,
    "parameters, later": lambda own, optimizer, step: share(own[2], own[0]) if step == 3 else None,
    "states": lambda own, optimizer, step: share_state(optimizer, own[2], own[0]) if step == 1 else None,
    "states, later": lambda own, optimizer, step: share_state(optimizer, own[2], own[0]) if step == 3 else None,
    "a parameter and its state": lambda own, optimizer, step: keep_itself(optimizer, own[2]) if step == 1 else None,
    "states of the same data, later": lambda own, optimizer, step: share_data(optimizer, own) if step == 3 else None,
}


def share(one: Tensor, other: Tensor) -> None:
    one.data = other.data


def share_state(optimizer: torch.optim.Optimizer, one: Tensor, other: Tensor) -> None:
    optimizer.state[one].update(optimizer.state[other])


def keep_itself(optimizer: torch.optim.Optimizer, own: Tensor) -> None:
    """As a float32 copy of the parameter does, which is none: ``parameter.float()``."""
    optimizer.state[own]["momentum_buffer"] = own.detach()


def share_data(optimizer: torch.optim.Optimizer, own: list[nn.Parameter]) -> None:
    first, last = (optimizer.state[parameter] for parameter in (own[0], own[2]))
    for name, value in first.items():
        if isinstance(value, Tensor):
            last[name].data = value.data


@each_once("name, when", SHARERS, SHARED)
def test_parameters_that_share_memory_are_not_stepped_at_once(name: str, when: str) -> None:
    """A program that reads both before it writes loses one of the updates, also if they share it since a later step."""
    make, shape = SHARERS[name]
    kernel, results = name == "one kernel", []
    for compiled in (False, True):
        generator = torch.Generator().manual_seed(0)
        own = [nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(3)]
        optimizer = make(own)
        if compiled:
            fxamp.compile_optimizer(optimizer, lowering="inductor" if kernel else "aot_eager")
        with forced(Implementation.INTERPRETER) if kernel else nullcontext():
            for step in range(6):
                SHARED[when](own, optimizer, step)
                for parameter in own:
                    parameter.grad = torch.randn(shape, generator=generator)
                optimizer.step()
        if compiled:
            assert any("share memory" in reason for reason in CompiledOptimizer.of(optimizer).reasons)
            assert (CompiledOptimizer.of(optimizer).compilations > 0) == ("later" in when)
        results.append([parameter.detach() for parameter in own])
    torch.testing.assert_close(*results)
