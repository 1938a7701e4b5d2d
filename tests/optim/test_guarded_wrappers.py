"""Steps that the host has to decide on, as they call another optimizer's; and those that only look as if."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import fxamp
from fxamp.optim import CompiledOptimizer

STEPS = 3


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
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    step = CompiledOptimizer.of(optimizer)
    assert step.reasons == ("its step calls that of another optimizer, AdamW",)
    assert step.compilations == 0


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
