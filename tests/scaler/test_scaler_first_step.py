"""A skipped step leaves no trace, also when it is the first, in which optimizers make their state."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracles.side_by_side import assert_same, snapshot
from support.programs.every_optimizer import ARGUMENTS, OPTIMIZERS, SPARSE_ONLY, arguments_of_step
from torch import Tensor

from fxamp.scaler import GradScaler

INJECTIONS = 1000
BAD = (float("inf"), float("-inf"), float("nan"))


def parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((2, 3), (4, 2))]


def loss(parameters: list[Tensor], iteration: int) -> Tensor:
    return torch.stack([(p - iteration).square().mean() for p in parameters]).sum()


def test_the_table_holds_every_optimizer() -> None:
    classes = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"}
    assert classes == set(ARGUMENTS) | SPARSE_ONLY


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_in_the_first_step_leaves_no_trace(name: str) -> None:
    """Two overflows, then three steps, equal three steps of the optimizer alone: parameters and state, exactly.

    Exactly, because scales are powers of two: scaling and unscaling a normal float32 then rounds nothing.
    """
    ours, alone = parameters(), parameters()
    optimizer, reference = OPTIMIZERS[name](ours), OPTIMIZERS[name](alone)
    scaler = GradScaler("cpu")
    for iteration in range(-2, 3):
        optimizer.zero_grad()
        scaler.scale(loss(ours, iteration)).backward()
        if iteration < 0:
            assert ours[1].grad is not None
            ours[1].grad[0, 0] = float("inf")
        result = scaler.step(optimizer, *arguments_of_step(optimizer), return_skipped=True)
        assert result.skipped is (iteration < 0)
        scaler.update()
        if iteration >= 0:
            reference.zero_grad()
            loss(alone, iteration).backward()
            reference.step(*arguments_of_step(reference))
    assert_same(ours, alone)
    assert_same(optimizer.state_dict()["state"], reference.state_dict()["state"])
    assert scaler.skipped_steps == 2


def test_a_parameter_that_joins_later_is_safe_too() -> None:
    """fused SGD makes its momentum in the first step with a gradient, whenever that is."""
    early, late = parameters()
    optimizer = torch.optim.SGD([{"params": [early]}, {"params": [late]}], lr=0.1, momentum=0.9, fused=True)
    scaler = GradScaler("cpu")
    for used, bad in (([early], False), ([early, late], True)):
        optimizer.zero_grad()
        scaler.scale(loss(used, 0)).backward()
        if bad:
            assert late.grad is not None
            late.grad.fill_(float("nan"))
        scaler.step(optimizer)
        scaler.update()
    assert late not in optimizer.state
    assert optimizer.state[early]["momentum_buffer"].isfinite().all()


@pytest.mark.parametrize("emptied", [lambda state: state.clear(), lambda state: state.update(momentum_buffer=None)])
def test_state_that_was_taken_away_is_safe_too(emptied: Callable[[dict[str, Any]], None]) -> None:
    """Old checkpoints hold a momentum of None."""
    own = parameters()[:1]
    optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9, fused=True)
    scaler = GradScaler("cpu")
    for bad in (False, True):
        scaler.scale(loss(own, 0) * (float("inf") if bad else 1.0)).backward()
        if bad:
            emptied(optimizer.state[own[0]])
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.state[own[0]].get("momentum_buffer") is None


def test_injected_overflows_never_change_a_parameter_or_a_state() -> None:
    """1,000 overflows at random steps and places, over every optimizer; clean steps between them do change things."""
    chance = random.Random(0)
    worlds = []
    for make in OPTIMIZERS.values():
        own = parameters()
        # The floor keeps the scale alive through more overflows than growth can make good.
        worlds.append((own, make(own), GradScaler("cpu", growth_interval=2, min_scale=1.0)))
    injected = clean = 0
    while injected < INJECTIONS:
        own, optimizer, scaler = chance.choice(worlds)
        bad = chance.random() < 0.8
        optimizer.zero_grad(set_to_none=chance.random() < 0.5)
        scaler.scale(loss(own, injected)).backward()
        if bad:
            gradient = chance.choice(own).grad
            assert gradient is not None
            gradient.view(-1)[chance.randrange(gradient.numel())] = chance.choice(BAD)
        if chance.random() < 0.3:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(own, 10.0)
        before = snapshot(own, [optimizer])
        result = scaler.step(optimizer, *arguments_of_step(optimizer), return_skipped=True)
        scaler.update()
        assert result.skipped is bad
        if bad:
            assert_same(snapshot(own, [optimizer]), before)
        else:
            assert any(not torch.equal(p, old) for p, old in zip(own, before[0], strict=True))
        injected += bad
        clean += not bad
    assert sum(scaler.skipped_steps for _, _, scaler in worlds) == INJECTIONS
    assert clean > 100
