"""Hooks before a compiled step may assign whatever the step reads, and read the gradients that it steps with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fxamp
from fxamp.optim import CompiledOptimizer
from fxamp.optim.reading.layout import optimized_parameters

Hook = Callable[[torch.optim.Optimizer], None]
WAYS = ("compile_optimizer", "scaler")


def halve_gradients(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimized_parameters(optimizer):
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5


def bound_gradients(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimized_parameters(optimizer):
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clamp(-0.1, 0.1)


def drop_a_gradient(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        optimized_parameters(optimizer)[1].grad = None


def halve_rate(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def zero_averages(optimizer: torch.optim.Optimizer) -> None:
    for entry in optimizer.state.values():
        entry["exp_avg"] = torch.zeros_like(entry["exp_avg"])


def forget_state(optimizer: torch.optim.Optimizer) -> None:
    """The step that follows creates the state, so it cannot run compiled."""
    optimizer.state.clear()


HOOKS = (halve_gradients, drop_a_gradient, halve_rate, zero_averages, forget_state)


def trained(way: str, hook: Hook, max_norm: float | None = None, every: bool = False) -> list[Tensor]:
    """Train with ``hook``, which is registered for all optimizers if ``every``; ``way`` "" is torch alone."""
    generator = torch.Generator().manual_seed(0)
    own: list[Tensor] = [nn.Parameter(torch.randn(4, 4, generator=generator)) for _ in range(2)]
    optimizer = torch.optim.AdamW(own, lr=0.1)
    if way == "compile_optimizer":
        fxamp.compile_optimizer(optimizer, clip_norm=max_norm, lowering="aot_eager")
    arguments: dict[str, Any] = {"enabled": way == "scaler", "skip": "device", "step_lowering": "aot_eager"}
    scaler = fxamp.GradScaler("cpu", init_scale=4.0, **arguments)
    calls: list[int] = []

    def pre_hook(hooked: torch.optim.Optimizer, *_: Any) -> None:
        calls.append(1)
        hook(hooked)

    handle = (register_optimizer_step_pre_hook if every else optimizer.register_step_pre_hook)(pre_hook)
    try:
        for _ in range(4):
            optimizer.zero_grad()
            loss = sum(
                ((parameter * torch.randn(4, 4, generator=generator)).sum() for parameter in own), torch.zeros(())
            )
            scaler.scale(loss).backward()
            if max_norm is not None and way != "compile_optimizer":
                scaler.clip_grad_norm_(optimizer, max_norm)
            scaler.step(optimizer)
            scaler.update()
    finally:
        handle.remove()
    assert len(calls) == 4
    if way:
        assert CompiledOptimizer.of(optimizer).compilations > 0
    return own


@each_once("hook, way", HOOKS, WAYS)
def test_a_step_takes_what_its_hooks_assign(hook: Hook, way: str) -> None:
    torch.testing.assert_close(trained(way, hook), trained("", hook))


@pytest.mark.parametrize("way", WAYS)
def test_a_step_takes_what_hooks_of_all_optimizers_assign(way: str) -> None:
    torch.testing.assert_close(trained(way, halve_rate, every=True), trained("", halve_rate, every=True))


@pytest.mark.parametrize("way", WAYS)
def test_hooks_read_clipped_gradients(way: str) -> None:
    """Bounds of 0.1 take more from gradients of norm 0.5 than from gradients that are clipped later."""
    ours, theirs = (trained(each, bound_gradients, max_norm=0.5) for each in (way, ""))
    torch.testing.assert_close(ours, theirs)


def stepping_by_closure(compiled: bool, replaced: bool = False) -> tuple[Tensor, list[str]]:
    own, calls = nn.Parameter(torch.zeros(4, 4)), []
    optimizer = torch.optim.SGD([own], lr=0.1, momentum=0.9)
    if replaced:
        step = optimizer.step
        optimizer.step = lambda closure=None: step(closure)  # type: ignore[method-assign]
    if compiled:
        fxamp.compile_optimizer(optimizer, lowering="aot_eager")

    def closure() -> Tensor:
        calls.append("closure")
        loss = (own - 1).square().sum()
        loss.backward()
        return loss

    def drop_gradients(hooked: torch.optim.Optimizer, *_: Any) -> None:
        calls.append("hook")
        hooked.zero_grad()

    optimizer.register_step_pre_hook(drop_gradients)
    optimizer.register_step_post_hook(lambda *_: calls.append("post-hook"))
    for _ in range(4):
        assert optimizer.step(closure) is not None
    if compiled:
        assert CompiledOptimizer.of(optimizer).compilations == (0 if replaced else 1)
    return own.detach(), calls


@pytest.mark.parametrize("replaced", [False, True])
def test_hooks_run_before_the_closure(replaced: bool) -> None:
    ours, theirs = (stepping_by_closure(compiled, replaced) for compiled in (True, False))
    torch.testing.assert_close(ours[0], theirs[0])
    assert ours[1] == theirs[1] == ["hook", "closure", "post-hook"] * 4
