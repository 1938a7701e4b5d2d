"""The same training under torch.amp.GradScaler with an eager optimizer, which is the oracle, and skip="device"."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from every_optimizer import Make
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp
from fxamp.optim import guarded

INF = float("inf")
SHAPES = ((4, 3), (2, 5), (3, 3))
INTERVAL = 2

Scaler = torch.amp.GradScaler


class HostReads(TorchDispatchMode):
    """Counts values that the host reads from tensors, each of which waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Scenario:
    """``bad``: steps whose gradients overflow; ``micro``: backwards a step; ``max_norm``: of clipping, or None."""

    bad: tuple[int, ...] = ()
    micro: int = 1
    max_norm: float | None = None
    steps: int = 5


SCENARIOS = {
    "clean": Scenario(),
    "skipped first": Scenario(bad=(0, 1)),
    "skipped later": Scenario(bad=(2,)),
    "accumulation": Scenario(bad=(0, 3), micro=2),
    "clipping": Scenario(bad=(0, 3), max_norm=0.5),
}


@dataclass
class Training:
    """Parameters, their optimizer and a scaler, stepped by :meth:`run`."""

    make: Make
    scaler: Scaler
    dtype: torch.dtype = torch.float32
    parameters: list[Tensor] = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        drawn = [torch.randn(shape, generator=generator).to(self.dtype) for shape in SHAPES]
        self.parameters = [nn.Parameter(value) for value in drawn]
        self.optimizer = self.make(self.parameters)

    def backward(self, step: int, scenario: Scenario) -> None:
        for micro in range(scenario.micro):
            generator = torch.Generator().manual_seed(100 * step + micro)
            aims = [torch.randn(p.shape, generator=generator).to(self.dtype) for p in self.parameters]
            terms = [(p - aim).square().sum() for p, aim in zip(self.parameters, aims, strict=True)]
            bad = step in scenario.bad and micro == 0
            self.scaler.scale(torch.stack(terms).sum() * (INF if bad else 1.0)).backward()

    def run(self, scenario: Scenario, steps: Sequence[int] | None = None) -> "Training":
        for step in range(scenario.steps) if steps is None else steps:
            self.optimizer.zero_grad()
            self.backward(step, scenario)
            if scenario.max_norm is not None:
                self.norms.append(float(clip(self.scaler, self.optimizer, self.parameters, scenario.max_norm)))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scales.append(self.scaler.get_scale())
        return self


def clip(scaler: Scaler, optimizer: torch.optim.Optimizer, parameters: list[Tensor], max_norm: float) -> Tensor:
    if isinstance(scaler, fxamp.GradScaler):
        return scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(parameters, max_norm)


def on_device(lowering: str = "aot_eager", **arguments: Any) -> fxamp.GradScaler:
    return fxamp.GradScaler("cpu", growth_interval=INTERVAL, skip="device", step_lowering=lowering, **arguments)


def by_torch() -> Scaler:
    return Scaler("cpu", growth_interval=INTERVAL)


def compilations(training: Training, lowering: str = "aot_eager") -> int:
    return compilations_of(training.optimizer, lowering)


def compilations_of(optimizer: torch.optim.Optimizer, lowering: str = "aot_eager") -> int:
    return guarded(optimizer, lowering).compilations


def assert_agree(ours: Training, theirs: Training, exact: Training | None) -> None:
    """Parameters and saved states agree: no further from float64's than a few roundings of torch's own are.

    ``exact`` is the same training in float64. Two computations of one formula differ by the roundings on their way;
    torch's distance from float64 shows how large these are here, and one last rounding of each value comes on top.
    """
    pairs = list(zip(ours.parameters, theirs.parameters, (exact or theirs).parameters, strict=True))
    pairs += list(zip(*(leaves(each) for each in (ours, theirs, exact or theirs)), strict=True))
    for our, their, true in pairs:
        assert our.dtype == their.dtype and our.shape == their.shape
        assert our.isfinite().all() or not their.isfinite().all()
        last = torch.finfo(torch.float32).eps * (1 + true.abs().max())
        assert (our - true).abs().max() <= 4 * (their - true).abs().max() + last
    assert ours.scales == theirs.scales


def leaves(training: Training) -> list[Tensor]:
    """The tensors of the saved state, in order, with their keys checked by being equal in number."""
    state = training.optimizer.state_dict()["state"]
    return [torch.as_tensor(entry[name]).float() for at, entry in sorted(state.items()) for name in sorted(entry)]
