"""One program steps flat parameters of any size: state in blocks as rows of a block, and the rest as a shorter row."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import exhaustive
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxamp
from fxamp.optim.packed_tensor import PackedTensor
from fxamp.optim.programs import any_size
from fxamp.optim.programs.any_size import InRows, of_any_size, serves_size
from fxamp.optim.tracing.trace import fake_mode
from fxamp.policy import Policy

SIZES = (1, 2, 255, 256, 257, 512, 700, 1283)
TABLES = {
    "8bit stochastic": 'state = "8bit"\nrounding = "stochastic"',
    "8bit": 'state = "8bit"',
    "float8": 'state = "float8_e4m3fn"',
}


class Averages(torch.optim.Optimizer):
    """Two averages, one of which is never negative, in ops that every compiler rounds as eager mode does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                zeros = torch.zeros_like(parameter)
                state |= {"step": torch.tensor(0.0), "mean": zeros, "square": zeros.clone()}
            state["step"] += 1
            state["mean"].mul_(0.5).add_(parameter.grad)
            state["square"].mul_(0.5).add_(parameter.grad * parameter.grad)
            parameter.mul_(0.5).add_(state["mean"] / state["step"])


def trained(table: str, lowering: str) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
    policy = Policy.loads(f'extends = ["cpu-bfloat16"]\n[optimizer]\n{table}\n')
    optimizer = fxamp.compile_optimizer(Averages(parameters), policy, lowering=lowering)
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    states = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    assert all(any(isinstance(value, PackedTensor) for value in optimizer.state[one].values()) for one in parameters)
    return [parameters, [part for value in states for part in getattr(value, "parts", (value,))]]


@pytest.mark.inductor
@pytest.mark.parametrize("name", exhaustive(TABLES, always=["8bit stochastic"]))
def test_rows_and_what_is_left_have_the_bits_of_flat_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = [], InRows.of

    def with_rows_only(*arguments: Any) -> InRows:
        made.append(replace(real(*arguments), flat=lambda *_: pytest.fail("it ran op by op")))
        return made[-1]

    monkeypatch.setattr(InRows, "of", with_rows_only)
    monkeypatch.setattr(any_size, "_MOST_ROWS", 2)
    assert_equal(trained(TABLES[name], "inductor"), trained(TABLES[name], "aot_eager"))
    assert len(made) == 1, "one program for all sizes"


def test_sizes_that_the_guards_exclude_are_not_served() -> None:
    """What Inductor assumes of the size, such as at least two blocks, must hold for every parameter's size."""

    def blocks(value: Tensor) -> Tensor:
        count = -(-value.shape[0] // 256)
        padded = torch.nn.functional.pad(value, (0, count * 256 - value.shape[0])).view(count, 256)
        return padded.amax(dim=1).unsqueeze(1).expand(-1, 256).reshape(-1)[: value.shape[0]] + value

    mode = fake_mode()
    with mode:
        gm = make_fx(torch.mul)(torch.empty(300), torch.empty(300))
    sized = of_any_size(gm, mode, {torch.ops.aten.mul.Tensor: lambda a, b: blocks(a) + b})
    serves = serves_size(sized, mode)
    assert [serves(numel) for numel in (1, 256, 257, 512, 10**6)] == [False, False, True, True, True]
