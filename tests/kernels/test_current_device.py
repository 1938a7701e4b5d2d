"""Work on tensors of a device that is not the current one: queries and launches are made with theirs as the current."""

from typing import Any

import numpy as np
import pytest
import torch
from support.machines.lacks import needs_gpus
from support.machines.simulated_gpus import SimulatedGpus
from torch import Tensor, nn

import fxamp
from fxamp.kernels import Implementation, ScaleRule, check_, forced, loss_scale_update, update_scale_
from fxamp.kernels.gradient_request import UnscaleRequest
from fxamp.scaler.torch_contract.step_outcomes import Outcomes

SECOND = torch.device("cuda", 1)


class OnSecond(Tensor):
    """Memory of the CPU that says it is on the second GPU."""

    device = SECOND  # type: ignore[assignment]
    is_cpu = False


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpus:
    return SimulatedGpus(monkeypatch)


def kernel(gpus: SimulatedGpus) -> Any:
    """A kernel that records its launch."""

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: gpus.note("launch")

    return Kernel()


def require_second(gpus: SimulatedGpus, *expected: str) -> None:
    """Fail unless all that was ``expected`` happened, all of it on the second GPU, and the first is current again."""
    assert {*expected} <= {what for what, _ in gpus.asked}
    assert {device for _, device in gpus.asked} == {1} and gpus.current == 0


def test_the_check(gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from fxamp.kernels import launch

    work = UnscaleRequest([torch.ones(3)], found_inf=torch.zeros(()))
    launches = launch._prepare_anew(work, launch._Addresses.of(work))
    monkeypatch.setattr(launch, "_prepare_anew", lambda *_: gpus.note("tables") or launches)
    monkeypatch.setattr(launch, "_function", lambda *_: kernel(gpus))
    monkeypatch.setattr(launch, "_launches", type(launch._launches)())
    gradient, found_inf = (torch.ones(size).as_subclass(OnSecond) for size in (3, 1))
    with forced(Implementation.TRITON):
        check_([gradient], found_inf)
    require_second(gpus, "capturing", "stream", "tables", "launch")


def test_the_step(gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from fxamp.optim.kernels import launch as step_launch
    from fxamp.optim.kernels.step_triton import Aligned

    sent = (torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(step_launch, "load_function", lambda *_: kernel(gpus))
    monkeypatch.setattr(step_launch, "_uploaded", lambda *_: gpus.note("tables") or sent[0])
    monkeypatch.setattr(step_launch.StepKernel, "_blocks_of", lambda *_: sent)
    step = step_launch.StepKernel.__new__(step_launch.StepKernel)
    step._target, step._flat = step_launch.StepTarget((3,), SECOND), np.array([True])
    step._gradient = np.array([False])
    step.scalars, step._cells, step._tables, step.texts = None, 0, None, dict.fromkeys(Aligned, "")
    step([[256]], [])
    require_second(gpus, "capturing", "stream", "tables", "launch")


def test_the_update_of_the_scale(gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale_update, "update_function", lambda *_, **__: kernel(gpus))
    scale, tracker, found_inf = (torch.ones(()).as_subclass(OnSecond) for _ in range(3))
    with forced(Implementation.TRITON):
        update_scale_(scale, tracker, found_inf, ScaleRule(2.0, 0.5, 2))
    require_second(gpus, "launch")


def test_the_outcome_of_a_step(gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, plain = Outcomes(), torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *sizes, dtype, device, pin_memory: plain(*sizes, dtype=dtype, device=device)
    )
    outcomes._stepped = torch.ones((), dtype=torch.bool).as_subclass(OnSecond)
    outcomes._skipped_on_device = torch.zeros((), dtype=torch.int64).as_subclass(OnSecond)
    outcomes.record(torch.zeros(()).as_subclass(OnSecond), SECOND)
    require_second(gpus, "capturing", "event")


@pytest.mark.gpu
@needs_gpus(2)
@pytest.mark.parametrize("skip", ["host", "device"])
def test_training_on_the_second_gpu_as_on_the_cpu(skip: str) -> None:
    """The current device stays the first one, and the second is late."""

    def trained(device: torch.device, kind: Any, **arguments: str) -> tuple[Tensor, float, list[bool]]:
        parameter = nn.Parameter(torch.ones(300, device=device))
        optimizer = torch.optim.SGD([parameter], lr=0.25, momentum=0.5)
        scaler, taken = kind(device.type, init_scale=4.0, **arguments), []
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(parameter.sum() * (float("inf") if step == 2 else 1.0)).backward()
            if device.type == "cuda":
                torch.cuda._sleep(20_000_000)
            scaler.step(optimizer)
            scaler.update()
            taken += scaler.poll_steps() if isinstance(scaler, fxamp.GradScaler) else []
        scale = scaler.get_scale()
        taken += scaler.poll_steps() if isinstance(scaler, fxamp.GradScaler) else []
        return parameter.detach().cpu(), scale, taken

    assert torch.cuda.current_device() == 0
    ours, scale, taken = trained(SECOND, fxamp.GradScaler, skip=skip)
    theirs, expected, _ = trained(torch.device("cpu"), torch.amp.GradScaler)
    assert torch.equal(ours, theirs) and scale == expected
    assert taken == [step != 2 for step in range(5)]
