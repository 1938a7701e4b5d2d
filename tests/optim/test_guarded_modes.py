"""Compiled steps after compiled backwards, with several ranks, and the words that choose them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once
from support.machines.ranks import on_ranks
from support.oracles.guarded_runs import INF, compilations_of
from support.programs.every_optimizer import OPTIMIZERS
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fxamp
from fxamp.errors import OptionError
from fxamp.tools.bench.host_syncs import HostReads

RANKS, BAD_RANK, BAD_STEP, STEPS = 2, 1, 1, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).square().mean()


def train(skip: str, name: str, max_norm: float | None) -> tuple[nn.Module, list[float], fxamp.GradScaler]:
    """Float16 training through the backend; one batch overflows in the first step, and one later."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    scaler = fxamp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, skip=skip, step_lowering="aot_eager")
    optimizer = OPTIMIZERS[name](model.parameters())
    compiled = torch.compile(
        model, backend="fxamp", options={"policy": "cpu-float16", "scaler": scaler, "lowering": "aot_eager"}
    )
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        loss = compiled(torch.randn(3, 4, generator=torch.Generator().manual_seed(step)))
        scaler.scale(loss * (INF if step in (0, 3) else 1.0)).backward()
        if max_norm is not None:
            scaler.clip_grad_norm_(optimizer, max_norm)
        with HostReads() as reads:
            scaler.step(optimizer)
            scaler.update()
        assert (reads.count == 0) is (skip == "device" or name.startswith("fused")) or step <= 1
        scales.append(scaler.loss_scale)
    assert compilations_of(optimizer) == (skip == "device")
    return model, scales, scaler


@each_once("max_norm, name", [None, 0.1], ["AdamW", "SGD"])
def test_behind_a_compiled_backward_it_does_as_the_host_would(name: str, max_norm: float | None) -> None:
    model, scales, scaler = train("device", name, max_norm)
    other, expected, _ = train("host", name, max_norm)
    assert scales == expected and scaler.skipped_steps == 2
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        # Adam divides by the root of squares: one rounding of a tiny gradient shows as one of the learning rate.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"skip": "devise"}, "skip='devise': expected one of 'host', 'device' (did you mean 'device'?)"),
        ({"skip": None}, "skip=None"),
        ({"skip": "device", "step_lowering": "inducter"}, "(did you mean 'inductor'?)"),
    ],
)
def test_a_wrong_word_is_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        fxamp.GradScaler("cpu", **arguments)
    assert message in str(raised.value)


def work(mesh: DeviceMesh) -> dict[str, Any]:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    scaler = fxamp.GradScaler("cpu", growth_interval=2, skip="device", step_lowering="aot_eager")
    taken, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(parameter.square().sum()).backward()
        if (mesh.get_local_rank(), step) == (BAD_RANK, BAD_STEP):
            assert parameter.grad is not None
            parameter.grad[1] = INF
        if step == 2:
            scaler.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
        taken += scaler.poll_steps()
        scales.append(scaler.get_scale())
    return {"taken": taken, "scales": scales, "parameter": parameter.detach()}


def test_ranks_agree_before_any_steps(tmp_path: Path) -> None:
    first, second = on_ranks(work, RANKS, tmp_path)
    assert first["taken"] == second["taken"] == [step != BAD_STEP for step in range(STEPS)]
    assert first["scales"] == second["scales"]
    assert torch.equal(first["parameter"], second["parameter"]) and first["parameter"].isfinite().all()
