"""A whole training step as one CUDA graph, replayed over overflows and changes of the scale."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.machines.lacks import ON_GPU
from torch import Tensor, nn

import fxamp
from fxamp.tools.common.cuda_syncs import no_cuda_syncs

pytestmark = [
    *ON_GPU,
    pytest.mark.inductor,
]

STEPS, BAD, WARM = 12, (3, 4, 8), 3
INF = float("inf")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).square().mean()


class Training:
    """One step is forward, backward, check, step, update, on inputs that stay where they are."""

    def __init__(self, graph_mode: bool, max_norm: float | None = None) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Net().cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = fxamp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2, skip="device", max_scale=2.0**12)
        options: dict[str, Any] = {"policy": "cuda-float16"} | ({"scaler": self.scaler} if graph_mode else {})
        self.forward = torch.compile(self.model, backend="fxamp", options=options)
        self.x, self.factor = torch.randn(16, 32, device="cuda"), torch.ones((), device="cuda")
        self.max_norm = max_norm

    def feed(self, step: int) -> None:
        self.x.copy_(torch.randn(16, 32, generator=torch.Generator().manual_seed(step)))
        self.factor.fill_(INF if step in BAD else 1.0)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(self.forward(self.x) * self.factor).backward()
        if self.max_norm is not None:
            self.scaler.clip_grad_norm_(self.optimizer, self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def outcome(self) -> tuple[list[Tensor], float, int]:
        return [p.detach().clone() for p in self.model.parameters()], self.scaler.loss_scale, self.scaler.skipped_steps


def uncaptured(**arguments: Any) -> list[tuple[list[Tensor], float, int]]:
    training, outcomes = Training(**arguments), []
    for step in range(STEPS):
        training.feed(step)
        training.step()
        outcomes.append(training.outcome())
    return outcomes


def assert_equal_outcomes(got: list[Any], expected: list[Any]) -> None:
    assert len({scale for _, scale, _ in expected}) > 2 and expected[-1][2] == len(BAD)
    for (parameters, *numbers), (others, *other_numbers) in zip(got, expected, strict=True):
        assert numbers == other_numbers
        for a, b in zip(parameters, others, strict=True):
            assert a.isfinite().all() and torch.equal(a, b)


@pytest.mark.parametrize("graph_mode", [True, False])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_whole_step_is_captured_and_replayed(graph_mode: bool, max_norm: float | None) -> None:
    expected = uncaptured(graph_mode=graph_mode, max_norm=max_norm)
    training, got = Training(graph_mode, max_norm=max_norm), []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in range(WARM):
            training.feed(step)
            training.step()
            got.append(training.outcome())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step()
    for step in range(WARM, STEPS):
        training.feed(step)
        graph.replay()
        got.append(training.outcome())
        assert training.scaler.stepped is not None and training.scaler.stepped.item() is (step not in BAD)
    assert_equal_outcomes(got, expected)


@pytest.mark.parametrize("name, arguments", [("AdamW", {}), ("SGD", {"lr": 0.1, "momentum": 0.9}), ("NAdam", {})])
def test_no_step_waits_for_the_gpu(name: str, arguments: dict[str, Any]) -> None:
    """torch's own detector raises at whatever would synchronise; it is off while the step is compiled."""
    parameters = [nn.Parameter(torch.ones(8, 8, device="cuda")) for _ in range(3)]
    optimizer = getattr(torch.optim, name)(parameters, **arguments)
    scaler = fxamp.GradScaler("cuda", skip="device")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(torch.stack([p.square().sum() for p in parameters]).sum()).backward()
        with no_cuda_syncs() if step > 1 else nullcontext():
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            scaler.poll_steps()
        schedule.step()
    assert all(entry["step"].is_cuda for entry in optimizer.state.values() if "step" in entry)
    saved = optimizer.state_dict()["state"].values()
    assert all(entry["step"].is_cpu for entry in saved if "step" in entry)


def test_a_captured_step_that_rounds_stochastically_draws_other_bits_in_each_replay() -> None:
    """Updates of a tenth of a unit in the last place: of many replays each weight takes some, and none takes all."""
    weight = nn.Parameter(torch.ones(4096, device="cuda", dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 2.0**-8 * 0.1)
    policy = fxamp.Policy.loads('extends = ["cuda-bfloat16"]\n[optimizer]\nrounding = "stochastic"\n')
    optimizer = fxamp.compile_optimizer(torch.optim.SGD([weight], lr=1.0), policy)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    results = []
    for _ in range(20):
        with torch.no_grad():
            weight.fill_(1.0)
        graph.replay()
        results.append(weight.detach().clone())
    assert all(not torch.equal(a, b) for at, a in enumerate(results) for b in results[:at])
    moved = torch.stack(results).ne(1).sum(0)
    assert moved.max() < len(results) and moved.float().mean().item() == pytest.approx(2, rel=0.2)
    (entry,) = optimizer.state_dict()["state"].values()
    assert entry["rounding_steps"] == WARM + len(results)
