"""The hooks of an optimizer's step are as fxamp takes them to be."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxamp import torch_private as private


def test_an_optimizers_hooks_are_called_in_torchs_order() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    usual = [*private.step_pre_hooks(optimizer)], [*private.step_post_hooks(optimizer)]
    calls: list[str] = []

    def say(word: str) -> Any:
        return lambda *_: calls.append(word)

    handles = [
        register_optimizer_step_pre_hook(say("every pre")),
        register_optimizer_step_post_hook(say("every post")),
        optimizer.register_step_pre_hook(say("own pre")),
        optimizer.register_step_post_hook(say("own post")),
    ]
    try:
        optimizer.step()
        by_torch, calls[:] = list(calls), []
        for hook in [*private.step_pre_hooks(optimizer), *private.step_post_hooks(optimizer)]:
            hook(optimizer, (), {})
    finally:
        for handle in handles:
            handle.remove()
    assert len(by_torch) == 4 and calls == by_torch
    assert ([*private.step_pre_hooks(optimizer)], [*private.step_post_hooks(optimizer)]) == usual


class Wrapper(torch.optim.Optimizer):
    """It is no optimizer of torch's making: its base has not been initialized."""

    def __init__(self, own: torch.optim.Optimizer) -> None:
        self.param_groups = own.param_groups


def test_a_wrapper_has_no_hooks() -> None:
    own = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert private.is_initialized(own) and not private.is_initialized(Wrapper(own))
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert [*private.step_pre_hooks(Wrapper(own)), *private.step_post_hooks(Wrapper(own))] == []
    finally:
        handle.remove()


def test_a_noted_step_keeps_schedulers_quiet() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    private.note_step(optimizer)
    scheduler.step()  # warns, which is an error in tests, if it does not know of the step
    silent = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        torch.optim.lr_scheduler.StepLR(silent, 1).step()
