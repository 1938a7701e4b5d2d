"""Small parameters on a CPU are stepped together, and as torch's own optimizer steps them."""

from typing import Any

import pytest
import torch
from support.checks.exhaustive import exhaustive
from torch import Tensor, nn

import fxamp
from fxamp.optim.programs.batch import MOST_ELEMENTS, Batch
from fxamp.tools.bench.host.steps import count_calls

#: Of two groups; the last two of the second are too large for a batch, or have no dimension.
SHAPES = [(4, 4), (3,), (1,), (2, 3, 4), (MOST_ELEMENTS,)], [(5,), (6, 2), (2, 2), (9,), (MOST_ELEMENTS + 1,), ()]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
    "RMSprop": {"lr": 1e-2},
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """For each batch that was tried the number of its parameters, and whether it was stepped together."""
    tried: list[tuple[int, bool]] = []
    original = Batch.step

    def noting(self: Batch, *arguments: Any) -> bool:
        tried.append((len(self.members), original(self, *arguments)))
        return tried[-1][1]

    monkeypatch.setattr(Batch, "step", noting)
    return tried


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    dense = [nn.Parameter(torch.randn(shape, generator=generator)) for group in SHAPES for shape in group]
    return [*dense, nn.Parameter(torch.randn(4, 6, generator=generator).t())]


def trained(name: str, compiled: bool, late: bool = False) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Train for five steps; ``late``: the first parameter gets no gradient in the first one, so its counter differs."""
    own = parameters()
    groups = [{"params": own[:5]}, {"params": own[5:], "lr": 3e-2}]
    optimizer = getattr(torch.optim, name)(groups, **OPTIMIZERS[name], foreach=False)
    if compiled:
        fxamp.compile_optimizer(optimizer)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        for at, parameter in enumerate(own):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if late and (at, step) == (0, 0) else torch.empty_like(parameter).copy_(gradient)
        optimizer.step()
    return own, optimizer


@pytest.mark.parametrize("name", exhaustive(OPTIMIZERS, always=["AdamW"]))
def test_small_parameters_are_stepped_together_as_torch_steps_them(name: str, steps: list[Any]) -> None:
    """Not those with many elements, without dimensions, or in another order of memory."""
    (own, optimizer), (others, reference) = trained(name, compiled=True), trained(name, compiled=False)
    torch.testing.assert_close(own, others, rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(own, others, strict=True):
        state, expected = optimizer.state[ours], reference.state[theirs]
        torch.testing.assert_close({key: float_of(value) for key, value in state.items()}, floats(expected))
    assert {*steps} == {(5, True), (4, True)}


def float_of(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else torch.tensor(float(value))


def floats(state: dict[str, Any]) -> dict[str, Any]:
    return {key: float_of(value) for key, value in state.items()}


def test_parameters_whose_counters_differ_are_stepped_alone(steps: list[Any]) -> None:
    (own, _), (others, _) = trained("AdamW", compiled=True, late=True), trained("AdamW", compiled=False, late=True)
    torch.testing.assert_close(own, others, rtol=1e-6, atol=1e-7)
    assert any(not together for _, together in steps)


def test_parameters_that_share_memory_are_stepped_one_after_the_other() -> None:
    results = []
    for compiled in (False, True):
        own = [nn.Parameter(torch.full((8,), float(at))) for at in range(6)]
        own[-1].data = own[0].data
        optimizer: torch.optim.Optimizer = torch.optim.SGD(own, lr=0.1, foreach=False)
        if compiled:
            optimizer = fxamp.compile_optimizer(optimizer)
        for step in range(3):
            for parameter in own:
                parameter.grad = torch.full((8,), step + 1.0)
            optimizer.step()
        results.append([parameter.detach().clone() for parameter in own])
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7)


@pytest.mark.exhaustive
def test_a_step_makes_no_calls_for_each_small_parameter() -> None:
    counts = []
    for number in (10, 35):
        own = [nn.Parameter(torch.ones(4, 4)) for _ in range(number)]
        for parameter in own:
            parameter.grad = torch.ones(4, 4)
        optimizer = fxamp.compile_optimizer(torch.optim.AdamW(own, lr=1e-3))
        for _ in range(3):
            optimizer.step()
        counts.append(count_calls(optimizer.step))
    assert round((counts[1] - counts[0]) / 25) == 0
