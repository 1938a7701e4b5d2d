"""One scaler over parameters on the CPU and on a GPU, as with CPU offload: nothing is read before it arrives."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from support.checks.equality import assert_equal
from support.machines.lacks import needs_gpu
from support.machines.late_copies import GPU, HOST, LateCopies
from torch import Tensor

import fxamp
from fxamp.kernels import Implementation, forced
from fxamp.optim.gradients import GradientGroup, Gradients
from fxamp.optim.shards import WHOLE
from fxamp.scaler.graphs.graph_flags import GraphFlags
from fxamp.scaler.torch_contract.rank_agreement import agree
from fxamp.scaler.torch_contract.step_outcomes import MOST_OUTCOMES, Outcomes

INF = float("inf")
#: The exact arithmetic of powers of two: no order of additions rounds.
SCALE, VALUES = 2.0**10, (1.0, 2.0, -4.0)
STEPS, BAD = 4, 2


@pytest.fixture(autouse=True)
def late(request: pytest.FixtureRequest) -> Iterator[LateCopies | None]:
    """A GPU that is late, for all tests that need no real one."""
    if request.node.get_closest_marker("gpu"):
        yield None
        return
    with LateCopies() as copies, forced(Implementation.REFERENCE):
        yield copies
    assert copies.late == 0


def trained(
    scaler: Any,
    home: torch.device,
    devices: tuple[torch.device, ...],
    bad: torch.device | None,
    max_norm: float | None = None,
    **arguments: Any,
) -> tuple[list[Tensor], float]:
    """Return parameters and scale after a few steps, in one of which a gradient on ``bad`` holds inf."""
    parameters = [torch.ones(3, device=device).requires_grad_() for device in devices]
    optimizer = torch.optim.AdamW(parameters, lr=0.25, **arguments)
    for step in range(STEPS):
        scale = scaler.scale(torch.ones((), device=home)).item()
        for parameter in parameters:
            parameter.grad = torch.tensor(VALUES, device=parameter.device) * scale
            if step == BAD and parameter.device == bad:
                parameter.grad[1] = INF
        if max_norm is not None and isinstance(scaler, fxamp.GradScaler):
            scaler.clip_grad_norm_(optimizer, max_norm)
        elif max_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach().to(HOST) for parameter in parameters], scaler.get_scale()


def reference(bad: bool, count: int, max_norm: float | None, **arguments: Any) -> tuple[list[Tensor], float]:
    """The same by torch, with everything on the CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    return trained(scaler, HOST, (HOST,) * count, HOST if bad else None, max_norm, **arguments)


@pytest.mark.parametrize("home", [GPU, HOST], ids=["scale-on-gpu", "scale-on-cpu"])
@pytest.mark.parametrize("bad", [GPU, HOST, None], ids=["bad-on-gpu", "bad-on-cpu", "all-good"])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_parameters_on_both(home: torch.device, bad: torch.device | None, max_norm: float | None) -> None:
    ours = trained(fxamp.GradScaler("cpu", init_scale=SCALE), home, (GPU, HOST), bad, max_norm)
    torch.testing.assert_close(ours, reference(bad is not None, 2, max_norm))


@pytest.mark.parametrize("bad", [HOST, None], ids=["bad", "all-good"])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize(
    "choice, arguments",
    [({"skip": "device", "step_lowering": "aot_eager"}, {}), ({}, {"fused": True})],
    ids=["compiled", "fused"],
)
def test_parameters_on_the_cpu_and_the_scale_on_a_gpu(
    bad: torch.device | None, max_norm: float | None, choice: dict[str, str], arguments: dict[str, bool]
) -> None:
    ours = trained(fxamp.GradScaler("cpu", init_scale=SCALE, **choice), GPU, (HOST, HOST), bad, max_norm, **arguments)
    torch.testing.assert_close(ours, reference(bad is not None, 2, max_norm, **arguments))


def test_a_loss_on_the_cpu_and_the_scale_on_a_gpu() -> None:
    scaler = fxamp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones((), device=GPU))
    assert scaler.scale(torch.ones(())).item() == scaler.graph_scale(HOST).item() == SCALE


def test_ranks_agree_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_initialized": True, "get_world_size": 2}.items():
        monkeypatch.setattr(dist, name, lambda *_, value=value: value)
    monkeypatch.setattr(dist, "all_reduce", lambda combined, *_: combined.add_(other))
    for home, other, own in [(GPU, 1.0, 0.0), (HOST, 0.0, 1.0), (GPU, 0.0, 0.0)]:
        flags = [torch.full((), own, device=GPU), torch.zeros((), device=HOST)]
        agree(flags, home, "world")
        assert [flag.item() for flag in flags] == [own or other] * 2


def test_flags_of_graphs_on_both() -> None:
    parameters = [torch.ones(2).requires_grad_() for _ in range(2)]
    flags = GraphFlags()
    flags.attach()
    for parameter, device in zip(parameters, (GPU, HOST), strict=True):
        parameter.grad = torch.ones(2)
        bad, square = torch.ones(1, dtype=torch.int32, device=device), torch.full((), 2.0, device=device)
        flags.record(lambda parameter=parameter: [ref(parameter)], bad, [parameter.grad], square)
    for device in (GPU, HOST):
        square = flags.square(Gradients(parameters), device)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        (report,) = flags.reports(GradientGroup(device, WHOLE, parameters, gradients), trusted=True)
        assert report.unread is None and report.flags is not None and report.flags.tolist() == [1, 1]
        assert square is not None and square.item() == 4.0


def test_few_places_copy_without_waiting() -> None:
    """Others ask the first; a step's outcome and measured values have events, values kept on the host ops that wait."""
    folder = Path(fxamp.__file__).parent
    files = {path.relative_to(folder) for path in folder.rglob("*.py") if "non_blocking=" in path.read_text()}
    with_event = ("scaler/torch_contract/step_outcomes.py", "nonfinite/monitor.py")
    assert files == set(map(Path, ("torch_devices.py", "kernels/host_memory.py", *with_event)))
    for place in with_event:
        text = (folder / place).read_text()
        assert re.findall(r"(\w+)\.copy_\(.*non_blocking=", text) == ["host"] and text.count("non_blocking") == 1


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("bad", [0, 1, None])
def test_losses_on_a_gpu_and_the_cpu(bad: int | None) -> None:
    """torch's scaler, all on the CPU: with a GPU it would itself read on the CPU what has not arrived."""

    def stepped(kind: Any, device: str) -> tuple[list[Tensor], dict[str, Any]]:
        parameters = [torch.ones(3, device=place, requires_grad=True) for place in (device, "cpu")]
        optimizer, scaler = torch.optim.SGD(parameters, lr=0.25), kind(device)
        for loss in scaler.scale([parameter.square().sum() for parameter in parameters]):
            loss.backward()
        if bad is not None:
            assert parameters[bad].grad is not None
            parameters[bad].grad[1] = INF
        scaler.step(optimizer)
        scaler.update()
        return [parameter.detach().cpu() for parameter in parameters], scaler.state_dict()

    ours, theirs = stepped(fxamp.GradScaler, "cuda"), stepped(torch.amp.GradScaler, "cpu")
    assert_equal(ours[0], theirs[0])
    assert ours[1] == theirs[1]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("bad", ["cpu", "cuda", None])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_gpu_that_is_late(bad: str | None, max_norm: float | None) -> None:
    """The GPU has work to do before it can copy; a host that does not wait reads what is not there yet."""
    scaler = fxamp.GradScaler("cuda", init_scale=SCALE)
    home, busy = torch.device("cuda", 0), torch.cuda._sleep
    own = scaler._check_scale_growth_tracker

    def delayed(name: str) -> Any:
        busy(20_000_000)
        return own(name)

    scaler._check_scale_growth_tracker = delayed  # type: ignore[method-assign]
    where = home if bad == "cuda" else HOST if bad == "cpu" else None
    ours = trained(scaler, home, (home, HOST), where, max_norm)
    torch.testing.assert_close(ours, reference(bad is not None, 2, max_norm))


@pytest.mark.gpu
@needs_gpu
def test_outcomes_that_nobody_asks_for() -> None:
    """The last ones are kept, in memory that is reused."""
    outcomes, flags = Outcomes(), [float(at % 3 == 0) for at in range(MOST_OUTCOMES + 50)]
    for flag in flags:
        outcomes.record(torch.tensor(flag, device="cuda"), torch.device("cuda", 0))
    torch.cuda.synchronize()
    assert outcomes.poll() == [not flag for flag in flags[-MOST_OUTCOMES:]]
    outcomes.record(torch.tensor(1.0, device="cuda"), torch.device("cuda", 0))
    torch.cuda.synchronize()
    assert outcomes.poll() == [False]
    assert outcomes.skipped_steps == sum(flags) + 1
    assert outcomes.stepped is not None and not outcomes.stepped
