"""Steps that the host has to decide on, as they call another optimizer's; and those that only look as if."""

from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import fxamp
from fxamp.optim import CompiledOptimizer

STEPS = 3


class Bare(torch.optim.Optimizer):
    """Lookahead as pytorch-optimizer has it, and other wrappers: the base is not initialized."""

    def __init__(self, own: torch.optim.Optimizer) -> None:
        self.own, self.defaults, self.state = own, own.defaults, own.state
        self.param_groups, self.calls = own.param_groups, 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.own.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.own.zero_grad(set_to_none)


class Lookahead(torch.optim.Optimizer):
    """Every second step pulls the weights back to where they were; ``inner`` says how the inner optimizer is held."""

    def __init__(self, parameters: Any, inner: str) -> None:
        fast = torch.optim.AdamW(parameters, lr=0.1)
        super().__init__(fast.param_groups, fast.defaults)
        self.fast = {"itself": fast, "list": [fast], "dict": {"fast": fast}}[inner]
        self.slow = [p.detach().clone() for group in fast.param_groups for p in group["params"]]
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        held: Any = self.fast
        fast = held[0] if isinstance(held, list) else held["fast"] if isinstance(held, dict) else held
        fast.step()
        self.calls += 1
        if self.calls % 2 == 0:
            own = [p for group in self.param_groups for p in group["params"]]
            for parameter, slow in zip(own, self.slow, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


def zero(parameters: Any) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.1)


WRAPPERS: dict[str, Any] = {
    "ZeroRedundancyOptimizer": zero,
    "itself": lambda parameters: Lookahead(parameters, "itself"),
    "in a list": lambda parameters: Lookahead(parameters, "list"),
    "in a dict": lambda parameters: Lookahead(parameters, "dict"),
}


def train(make: Any, skip: str) -> tuple[list[Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = make(net.parameters())
    scaler = fxamp.GradScaler("cpu", init_scale=8.0, skip=skip, step_lowering="aot_eager")
    for _ in range(STEPS):
        scaler.scale(net(torch.ones(3, 4)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()], optimizer


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_step_that_calls_another_optimizers_is_left_to_the_host_and_nothing_is_tried(wrapper: str) -> None:
    ours, optimizer = train(WRAPPERS[wrapper], "device")
    expected, _ = train(WRAPPERS[wrapper], "host")
    assert_equal(ours, expected)
    step = CompiledOptimizer.of(optimizer)
    assert step.reasons == ("its step calls that of another optimizer, AdamW",)
    assert step.compilations == 0


@pytest.mark.parametrize("skip", ["host", "device"])
def test_a_wrapper_whose_base_is_not_initialized(skip: str, caplog: pytest.LogCaptureFixture) -> None:
    ours, optimizer = train(lambda parameters: Bare(torch.optim.AdamW(parameters, lr=0.1)), skip)
    expected, _ = train(lambda parameters: torch.optim.AdamW(parameters, lr=0.1), "host")
    assert_equal(ours, expected)
    assert ("without calling torch.optim.Optimizer.__init__" in caplog.text) == (skip == "device")
    assert optimizer.calls == STEPS  # type: ignore[attr-defined]


def test_a_wrapper_steps_compiled_if_what_it_wraps_is(caplog: pytest.LogCaptureFixture) -> None:
    own = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    plain, wrapped = (torch.optim.AdamW([parameter]) for parameter in own)
    compiled = fxamp.compile_optimizer(Bare(fxamp.compile_optimizer(wrapped, lowering="aot_eager")))
    for _ in range(STEPS):
        for parameter, optimizer in zip(own, (plain, compiled), strict=True):
            parameter.grad = torch.ones(2)
            optimizer.step()
    assert "Bare: its step runs uncompiled: it wraps an optimizer without" in caplog.text
    assert torch.equal(*own) and CompiledOptimizer.of(wrapped).compilations == 1


@pytest.mark.parametrize("arguments", [(), (None,)])
def test_no_closure_is_no_argument(arguments: tuple[None, ...]) -> None:
    """As Accelerate and Lightning call it."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    scaler = fxamp.GradScaler("cpu", skip="device", step_lowering="aot_eager")
    for _ in range(STEPS):
        scaler.scale(parameter.square().sum()).backward()
        scaler.step(optimizer, *arguments)
        scaler.update()
        optimizer.zero_grad()
    step = CompiledOptimizer.of(optimizer)
    assert (step.reasons, step.compilations) == ((), 1)
