"""Optimizers that users write: what a compiled step must not take for an op on single elements, and what it reads."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once, exhaustive
from support.oracles.guarded_runs import parts_of
from support.programs.user_optimizers import EachParameter
from support.programs.written_steps import LOWERINGS, Body, State, stepped
from torch import Tensor, nn

import fxamp
from fxamp.kernels import Implementation, forced
from fxamp.optim import CompiledOptimizer
from fxamp.optim.programs.kind_step import KindStep

UPDATES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros_like.normal_": lambda p: torch.zeros_like(p).normal_(),
    "full_like.bernoulli_": lambda p: torch.full_like(p, 0.5).bernoulli_(0.5),
    "normal of zeros": lambda p: torch.normal(torch.zeros_like(p), 1.0),
    "randn": lambda p: torch.randn(p.shape),
    "cumsum of ones": lambda p: torch.ones_like(p).cumsum(-1),
    "sum of ones": lambda p: torch.ones_like(p).sum() + torch.zeros_like(p),
    "softmax of ones": lambda p: torch.ones_like(p).softmax(-1),
}


class Own(EachParameter):
    """SGD with momentum that ``update`` moves too."""

    def __init__(self, parameters: Any, update: Callable[[Tensor], Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.update = update

    def step_one(self, parameter: Any, group: dict[str, Any]) -> None:
        mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
        mean.mul_(0.5).add_(parameter.grad)
        parameter.add_(self.update(parameter), alpha=0.01).add_(mean, alpha=-group["lr"])


def moved(update: Callable[[Tensor], Tensor], lowering: str | None) -> list[Tensor]:
    """By how much the second step moves two parameters of different sizes."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(4, 4))]
    optimizer = Own(parameters, update)
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.1)
        optimizer.step()
        if lowering is not None:
            fxamp.compile_optimizer(optimizer, lowering=lowering)
    return [parameter.detach() - own for parameter, own in zip(parameters, before, strict=True)]


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", UPDATES)
def test_elements_that_depend_on_others_or_on_chance(name: str, lowering: str) -> None:
    own, compiled = moved(UPDATES[name], None), moved(UPDATES[name], lowering)
    for theirs, ours in zip(own, compiled, strict=True):
        if "of ones" in name:
            assert torch.allclose(ours, theirs, atol=1e-6)
        else:  # other random numbers, but one for each element
            assert len(ours.unique()) == len(theirs.unique()) > 1


class Decaying(EachParameter):
    """SGD, but groups with ``decay_only`` read no gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "decay_only": False})

    def step_one(self, parameter: Any, group: dict[str, Any]) -> None:
        if group["decay_only"]:
            parameter.mul_(1 - group["lr"])
        else:
            parameter.add_(parameter.grad, alpha=-group["lr"])


def test_a_group_that_reads_no_gradient() -> None:
    steps = []
    for scaler in (
        torch.amp.GradScaler("cpu", init_scale=4.0),
        fxamp.GradScaler("cpu", init_scale=4.0, skip="device", step_lowering="aot_eager"),
    ):
        a, b = (nn.Parameter(torch.ones(4)) for _ in range(2))
        optimizer = Decaying([{"params": [a]}, {"params": [b], "decay_only": True}])
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale((a + b).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        steps.append((a.detach(), b.detach()))
    assert_equal(*steps)


class Clamped(EachParameter):
    """Its momentum stays between ``least`` and ``most``."""

    def __init__(self, parameters: Any, least: float | None, most: float | None) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.least, self.most = least, most

    def step_one(self, parameter: Any, group: dict[str, Any]) -> None:
        mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
        mean.copy_((mean * 0.5 + parameter.grad).clamp(self.least, self.most))
        parameter.sub_(mean, alpha=group["lr"])


@pytest.mark.parametrize(
    ("least", "most", "form"),
    [(-1.0, 1.0, "s3m4"), (None, 1.0, "s3m4"), (0.0, 1.0, "u5m3"), (0.0, None, "u5m3"), (0.0, -0.5, "s3m4")],
)
def test_a_state_is_unsigned_only_if_its_bounds_say_so(least: float | None, most: float | None, form: str) -> None:
    parameter = nn.Parameter(torch.zeros(64, 64))
    optimizer = Clamped([parameter], least, most)
    policy = fxamp.Policy.loads('extends = ["cpu-bfloat16"]\n[optimizer]\nstate = {"*" = "8bit"}\n')
    fxamp.compile_optimizer(optimizer, policy, lowering="aot_eager")
    for gradient in (0.5, 0.5, -0.9, -0.9):
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
    assert optimizer.state[parameter]["mean"].form == form


def heavy_ball(parameter: nn.Parameter, state: State, rate: float) -> None:
    """It remembers the parameter, after it has changed it."""
    old = parameter.clone()
    parameter.add_(0.9 * (parameter - state["first"]) - rate * parameter.grad)
    state["first"].copy_(old)


def viewed(parameter: nn.Parameter, state: State, rate: float) -> None:
    """It remembers a view of a copy."""
    old = parameter.clone().view(-1)
    parameter.sub_(parameter.grad + state["first"], alpha=rate)
    state["first"] = old.view_as(parameter)


def replaced(parameter: nn.Parameter, state: State, rate: float) -> None:
    """New tensors become the state: one holds the parameter, the other what that one held."""
    state["first"], state["second"] = parameter.clone(), state["first"]
    parameter.sub_(parameter.grad + state["second"], alpha=rate)


def swapped(parameter: nn.Parameter, state: State, rate: float) -> None:
    """Two states are written, each with the old value of the other."""
    first, second = state["first"].clone(), state["second"].clone()
    state["first"].copy_(second)
    state["second"].copy_(first)
    parameter.sub_(parameter.grad + state["first"], alpha=rate)


@each_once("body, lowering", [heavy_ball, viewed, replaced, swapped], LOWERINGS)
def test_what_it_remembers_is_the_old_value(body: Body, lowering: str) -> None:
    def state(parameter: nn.Parameter) -> State:
        return {"first": torch.zeros_like(parameter), "second": torch.ones_like(parameter)}

    own, compiled = (stepped(body, state, way, torch.float32) for way in ("eager", lowering))
    torch.testing.assert_close(compiled, own)


def powers(parameter: nn.Parameter, state: State, rate: float) -> None:
    """Adam's second moment; the power of its coefficient is a Python float."""
    state["power"] *= 0.999
    state["mean"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
    parameter.addcdiv_(parameter.grad, (state["mean"] / (1 - state["power"])).sqrt().add_(1e-8), value=-rate)


def power_of_an_integer(parameter: nn.Parameter, state: State, rate: float) -> None:
    """As :func:`powers`, with the power computed from the number of steps, and a rate that falls with it."""
    state["steps"] += 1
    state["mean"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
    deviation = (state["mean"] / (1 - 0.999 ** state["steps"])).sqrt().add_(1e-8)
    parameter.sub_(parameter.grad / deviation * (rate / state["steps"]))


@pytest.mark.parametrize("lowering", exhaustive(LOWERINGS, always=["aot_eager", "interpreter"]))
@pytest.mark.parametrize("dtype", exhaustive([torch.float32, torch.float64], always=[torch.float32]))
@pytest.mark.parametrize("body, number", [(powers, {"power": 1.0}), (power_of_an_integer, {"steps": 0})])
def test_python_numbers_in_the_state_are_float64(body: Body, number: State, dtype: torch.dtype, lowering: str) -> None:
    def state(parameter: nn.Parameter) -> State:
        return {"mean": torch.zeros_like(parameter), **number}

    own, compiled = (stepped(body, state, way, dtype) for way in ("eager", lowering))
    torch.testing.assert_close(compiled, own, rtol=1e-12 if dtype is torch.float64 else 1e-6, atol=0, check_dtype=False)


def whole_numbers(parameter: nn.Parameter, state: State, rate: float) -> None:
    parameter.sub_(parameter.grad * state["count"], alpha=rate)
    state["count"].add_(1)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_int16_state_has_a_number_for_each_element(lowering: str) -> None:
    def state(parameter: nn.Parameter) -> State:
        return {"count": torch.arange(parameter.numel(), dtype=torch.int16).view_as(parameter)}

    own, compiled = (stepped(whole_numbers, state, way, torch.float32) for way in ("eager", lowering))
    torch.testing.assert_close(compiled, own)


def halved(parameter: nn.Parameter, state: State, rate: float) -> None:
    parameter.sub_(parameter.grad * state["count"], alpha=rate)
    state["count"] = state["count"] * 0.5


def test_an_integer_tensor_that_becomes_a_float_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    def state(parameter: nn.Parameter) -> State:
        return {"count": torch.tensor(5)}

    own, compiled = (stepped(halved, state, way, torch.float32) for way in ("eager", "eager-kernel"))
    torch.testing.assert_close(compiled, own)
    assert "'count' of its state changes its dtype from step to step" in caplog.text


class OnLists(torch.optim.Optimizer):
    """SGD with momentum by ops on lists; ``foreach=False`` takes another way, which also negates the gradients."""

    def __init__(self, parameters: Any, foreach: bool) -> None:
        super().__init__(parameters, {"lr": 0.1, "foreach": foreach})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = group["params"]
            means = [self.state[p].setdefault("mean", torch.zeros_like(p)) for p in parameters]
            torch._foreach_mul_(means, 0.9)
            torch._foreach_add_(means, [p.grad for p in parameters])
            torch._foreach_copy_([self.state[p].setdefault("last", torch.zeros_like(p)) for p in parameters], means)
            torch._foreach_addcdiv_(parameters, means, [m.abs() + 1 for m in means], value=-group["lr"])
            if not group["foreach"]:
                torch._foreach_neg_([p.grad for p in parameters])


@each_once("lowering, foreach", LOWERINGS, [True, False])
def test_ops_on_lists_are_one_program_for_all_parameters(lowering: str, foreach: bool) -> None:
    def run(compiled: bool) -> tuple[list[Tensor], torch.optim.Optimizer]:
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5,), (2, 3), (4, 1))]
        optimizer = OnLists(parameters, foreach)
        if compiled:
            fxamp.compile_optimizer(optimizer, lowering="aot_eager" if lowering == "aot_eager" else "inductor")
        with forced(Implementation.INTERPRETER) if compiled and lowering == "interpreter" else nullcontext():
            for _ in range(3):
                for parameter in parameters:
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
                optimizer.step()
        return [*(p.detach() for p in parameters), *(p.grad for p in parameters if p.grad is not None)], optimizer

    own, optimizer = run(True)
    torch.testing.assert_close(own, run(False)[0])
    (part,) = parts_of(CompiledOptimizer.of(optimizer))
    assert isinstance(part, KindStep) and len(part.members.kinds) == 3


def test_a_number_that_is_read_from_a_tensor_runs_uncompiled(caplog: pytest.LogCaptureFixture) -> None:
    def body(parameter: nn.Parameter, state: State, rate: float) -> None:
        state["seen"] += parameter.grad.abs().sum().item()  # type: ignore[union-attr]
        parameter.sub_(parameter.grad, alpha=rate / (1 + state["seen"]))

    own, compiled = (stepped(body, lambda _: {"seen": 0}, way, torch.float32) for way in ("eager", "aot_eager"))
    torch.testing.assert_close(compiled, own)
    assert "Written: its step runs uncompiled: it reads the value of a tensor on the host" in caplog.text


def test_what_a_step_compiles_itself_is_compiled_afterwards_too() -> None:
    def update(parameter: Tensor) -> Tensor:
        return parameter.sin()

    compiled = torch.compile(update, backend="eager", fullgraph=True, dynamic=False)
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    optimizer = Own([parameter], compiled)
    fxamp.compile_optimizer(optimizer, lowering="aot_eager")
    optimizer.step()
    optimizer.step()
    assert CompiledOptimizer.of(optimizer).compilations == 1
    torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).sin())
