"""Steps that autograd records, as ``differentiable=True`` asks, stay in the graph of a compiled optimizer too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from torch import Tensor

import fxamp
from fxamp.optim import CompiledOptimizer

MAKES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda own, **more: torch.optim.SGD(own, lr=0.1, **more),
    "momentum": lambda own, **more: torch.optim.SGD(own, lr=0.1, momentum=0.9, **more),
    "RMSprop": lambda own, **more: torch.optim.RMSprop(own, lr=0.1, **more),
    "Adagrad": lambda own, **more: torch.optim.Adagrad(own, lr=0.1, **more),
    "AdamW": lambda own, **more: torch.optim.AdamW(own, lr=0.1, **more),
}


def through_steps(make: str, compiled: bool) -> tuple[Tensor, Tensor]:
    """Return a parameter after three steps, and the gradient through them of a factor of its gradients."""
    factor = torch.tensor(2.0, requires_grad=True)
    parameter = torch.ones(3, requires_grad=True).clone()
    optimizer = MAKES[make]([parameter], differentiable=True)
    if compiled:
        fxamp.compile_optimizer(optimizer, lowering="aot_eager")
    for at in range(3):
        parameter.grad = torch.arange(1.0, 4.0) * (at + 1) * factor
        optimizer.step()
    if compiled:
        assert CompiledOptimizer.of(optimizer).reasons[0].startswith("differentiable=True")
    (gradient,) = torch.autograd.grad(parameter.square().sum(), factor)
    return parameter.detach(), gradient


@pytest.mark.parametrize("make", MAKES)
def test_autograd_reaches_what_came_before_the_steps(make: str) -> None:
    assert_equal(through_steps(make, True), through_steps(make, False))


def of_a_later_step(compiled: bool) -> list[Any]:
    """Return what a step leaves that autograd records after two that it does not."""
    leaf = torch.ones(3, requires_grad=True)
    optimizer = MAKES["momentum"]([leaf])
    if compiled:
        fxamp.compile_optimizer(optimizer, lowering="aot_eager")
    factor = torch.tensor(2.0, requires_grad=True)
    for at in range(4):
        optimizer.defaults["differentiable"] = at == 2
        leaf.requires_grad_(at != 2)
        leaf.grad = torch.ones(3) * (factor if at == 2 else factor.detach())
        optimizer.step()
        if at == 2:
            (gradient,) = torch.autograd.grad(leaf.sum(), factor)
            optimizer.state[leaf]["momentum_buffer"].detach_()
            leaf.detach_()
    assert not compiled or CompiledOptimizer.of(optimizer).compilations
    return [leaf.detach(), gradient]


def test_a_step_that_autograd_records_comes_between_compiled_ones() -> None:
    torch.testing.assert_close(of_a_later_step(True), of_a_later_step(False))
