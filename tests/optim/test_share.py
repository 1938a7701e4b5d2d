"""Groups that differ only in numbers share a program: each steps as it would in an optimizer of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import exhaustive
from support.oracles.guarded_runs import parts_of
from support.programs.user_optimizers import EachParameter
from torch import Tensor, nn

import fxamp
from fxamp.kernels import Implementation, forced, interpreter
from fxamp.optim import CompiledOptimizer

SHAPES = ((4, 3), (3,))
AdamW, SGD, RMSprop = torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop
Groups = tuple[dict[str, Any], ...]

SHARED: dict[str, tuple[Any, Groups]] = {
    "decayed and not": (AdamW, ({"weight_decay": 0.1}, {"weight_decay": 0.0})),
    "not decayed and decayed": (AdamW, ({"weight_decay": 0.0}, {"weight_decay": 0.1})),
    "a zero that is an int": (AdamW, ({"weight_decay": 0.1}, {"weight_decay": 0})),
    "in another order": (AdamW, ({"lr": 0.1, "weight_decay": 0.1}, {"weight_decay": 0.0, "lr": 0.2})),
    "two decays, other betas": (AdamW, ({"weight_decay": 0.1}, {"weight_decay": 0.2, "betas": (0.8, 0.9)})),
    "no decay, two rates": (AdamW, ({"weight_decay": 0.0}, {"weight_decay": 0.0, "lr": 0.3})),
    "three": (AdamW, ({"weight_decay": 0.0}, {"weight_decay": 0.1}, {"weight_decay": 0.2})),
    "two momenta": (SGD, ({"momentum": 0.9}, {"momentum": 0.5})),
}
APART: dict[str, tuple[Any, Groups]] = {
    "a term in the gradient": (torch.optim.Adam, ({"weight_decay": 0.1}, {"weight_decay": 0.0})),
    "uphill": (AdamW, ({"maximize": True}, {"maximize": False})),
    "no momentum": (SGD, ({"momentum": 0.9}, {"momentum": 0.0})),
    "centered": (RMSprop, ({"centered": True}, {"centered": False})),
}


class Guided(EachParameter):
    """Every group reads the rate of the first one too."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    def step_one(self, parameter: Any, group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad * group["lr"] * (1.0 + self.param_groups[0]["lr"]))


def parameters(group: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(group)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def trained(make: Any, groups: Groups, own: list[list[nn.Parameter]], seeds: list[int], **how: Any) -> Any:
    param_groups = [{"params": params, **settings} for params, settings in zip(own, groups, strict=True)]
    optimizer = make(param_groups, lr=0.1)
    if how:
        fxamp.compile_optimizer(optimizer, **how)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        for params, seed in zip(own, seeds, strict=True):
            generator = torch.Generator().manual_seed(10 * step + seed + 5)
            for parameter in params:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        schedule.step()
    return optimizer


def parts(optimizer: torch.optim.Optimizer, lowering: str = "aot_eager") -> int:
    return len(parts_of(CompiledOptimizer.of(optimizer)))


def together_and_apart(make: Any, groups: Groups, **how: Any) -> tuple[Any, list[list[nn.Parameter]], Any]:
    together, apart = ([parameters(at) for at in range(len(groups))] for _ in range(2))
    optimizer = trained(make, groups, together, [*range(len(groups))], **how)
    for at, settings in enumerate(groups):
        trained(make, (settings,), [apart[at]], [at], **how)
    return optimizer, together, apart


@pytest.mark.parametrize(
    "name", exhaustive([*SHARED, *APART], always=["decayed and not", "three", "two momenta", "uphill"])
)
def test_each_group_steps_as_its_own_program_would(name: str) -> None:
    optimizer, ours, theirs = together_and_apart(*(SHARED | APART)[name], lowering="aot_eager")
    assert parts(optimizer) == (1 if name in SHARED else 2)
    assert_equal(ours, theirs)


def test_adamw_with_two_groups_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Any] = []
    real: Callable[..., Any] = interpreter.Interpreted.__getitem__
    monkeypatch.setattr(interpreter.Interpreted, "__getitem__", lambda s, grid: launches.append(grid) or real(s, grid))
    with forced(Implementation.INTERPRETER):
        optimizer, ours, theirs = together_and_apart(*SHARED["decayed and not"], lowering="inductor")
        assert_equal(ours, theirs)
        launches.clear()
        optimizer.step()
    assert parts(optimizer, "inductor") == 1 and launches == [(4,), (4,)]  # of 0-dim values, and of the step


def test_another_groups_number_is_no_number_of_the_own() -> None:
    results: list[list[Tensor]] = []
    for how in ({}, {"lowering": "aot_eager"}):
        own = [parameters(0), parameters(1)]
        optimizer = trained(Guided, ({"lr": 0.5}, {"lr": 0.25}), own, [0, 1], **how)
        results.append([parameter.detach() for params in own for parameter in params])
    torch.testing.assert_close(*results, rtol=4 * torch.finfo(torch.float32).eps, atol=1e-6)
    assert parts(optimizer) == 2


def test_a_decay_that_stops_being_zero_compiles_again() -> None:
    results = []
    for lowering in ("", "aot_eager"):
        own = [parameters(0), parameters(1)]
        how = {"lowering": lowering} if lowering else {}
        optimizer = trained(AdamW, SHARED["decayed and not"][1], own, [0, 1], **how)
        optimizer.param_groups[1]["weight_decay"] = 0.5
        optimizer.step()
        results.append([parameter.detach() for params in own for parameter in params])
    step = CompiledOptimizer.of(optimizer)
    assert step.compilations == 2 and parts(optimizer) == 1
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
