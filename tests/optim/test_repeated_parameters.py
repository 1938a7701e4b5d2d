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
    for ours, theirs in zip(stepped(make, place, True), stepped(make, place, False), strict=True):
        torch.testing.assert_close(ours, theirs)


SHARERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], tuple[int, ...]]] = {
    "one program": (lambda own: torch.optim.Muon(own, lr=0.1), (4, 3)),
    "no dimension": (lambda own: torch.optim.SGD(own, lr=0.1, foreach=False), ()),
    "one kernel": (lambda own: torch.optim.SGD(own, lr=0.1, foreach=False), (4, 3)),
}


@pytest.mark.parametrize("name", SHARERS)
def test_parameters_that_share_memory_are_not_stepped_at_once(name: str) -> None:
    """A program that reads both before it writes loses one of the updates."""
    make, shape = SHARERS[name]
    kernel, results = name == "one kernel", []
    for compiled in (False, True):
        generator = torch.Generator().manual_seed(0)
        own = [nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(3)]
        own[2].data = own[0].data
        optimizer = make(own)
        if compiled:
            fxamp.compile_optimizer(optimizer, lowering="inductor" if kernel else "aot_eager")
        with forced(Implementation.INTERPRETER) if kernel else nullcontext():
            for _ in range(3):
                for parameter in own:
                    parameter.grad = torch.randn(shape, generator=generator)
                optimizer.step()
        if compiled:
            assert any("share memory" in reason for reason in CompiledOptimizer.of(optimizer).reasons)
        results.append([parameter.detach() for parameter in own])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
