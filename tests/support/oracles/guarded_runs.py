"""The same training under torch.amp.GradScaler with an eager optimizer, which is the oracle, and skip="device"."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxamp
from fxamp.optim import CompiledOptimizer
from support.programs.every_optimizer import Make, arguments_of_step

INF = float("inf")
SHAPES = ((4, 3), (2, 5), (3, 3))
#: Steps until the scale grows: few enough that it grows within a scenario.
INTERVAL = 2

Scaler = torch.amp.GradScaler


@dataclass(frozen=True)
class Scenario:
    """``bad``: steps whose gradients overflow; ``micro``: backwards a step; ``max_norm``: of clipping, or None."""

    bad: tuple[int, ...] = ()
    micro: int = 1
    max_norm: float | None = None


SCENARIOS = {
    "clean": Scenario(),
    "skipped first": Scenario(bad=(0, 1)),
    "skipped later": Scenario(bad=(2,)),
    "accumulation": Scenario(bad=(0, 3), micro=2),
    "clipping": Scenario(bad=(0, 3), max_norm=0.5),
}


@dataclass
class Training:
    """Parameters, their optimizer and a scaler, stepped by :meth:`run`.

    The loss is the squared distance of all parameters from random targets, which differ in each backward.

    Args:
        dtype: of the parameters; draws are float32 whatever it is.
        sparse: whether gradients are sparse: of every other row of each parameter.
    """

    make: Make
    scaler: Scaler
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    shapes: Sequence[tuple[int, int]] = SHAPES
    sparse: bool = False
    parameters: list[Tensor] = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.parameters = [nn.Parameter(self._drawn(shape, generator)) for shape in self.shapes]
        self.optimizer = self.make(self.parameters)

    def backward(self, step: int, scenario: Scenario) -> None:
        """Add the gradients of all micro-batches of a step."""
        for micro in range(scenario.micro):
            generator = torch.Generator().manual_seed(100 * step + micro)
            aims = [self._drawn(p.shape, generator) for p in self.parameters]
            terms = [self._away(p, aim).square().sum() for p, aim in zip(self.parameters, aims, strict=True)]
            bad = step in scenario.bad and micro == 0
            self.scaler.scale(torch.stack(terms).sum() * (INF if bad else 1.0)).backward()  # type: ignore[no-untyped-call]

    def update(self, scenario: Scenario) -> Tensor | None:
        """Clip if the scenario says so, step and update; return the norm before clipping. Reads nothing on the host."""
        norm = None
        if scenario.max_norm is not None:
            norm = clip(self.scaler, self.optimizer, self.parameters, scenario.max_norm)
        self.scaler.step(self.optimizer, *arguments_of_step(self.optimizer))
        self.scaler.update()
        return norm

    def run(self, scenario: Scenario, steps: Sequence[int] = range(5)) -> "Training":
        """Train through ``steps`` of the scenario; returns itself."""
        for step in steps:
            self.optimizer.zero_grad()
            self.backward(step, scenario)
            norm = self.update(scenario)
            if norm is not None:
                self.norms.append(float(norm))
            self.scales.append(self.scaler.get_scale())
        return self

    def _drawn(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.randn(*shape, generator=generator).to(self.device, self.dtype)

    def _away(self, parameter: Tensor, aim: Tensor) -> Tensor:
        if not self.sparse:
            return parameter - aim
        rows = torch.arange(0, len(parameter), 2, device=self.device)
        return nn.functional.embedding(rows, parameter, sparse=True) - aim[rows]


def clip(scaler: Scaler, optimizer: torch.optim.Optimizer, parameters: list[Tensor], max_norm: float) -> Tensor:
    """Clip with fxamp's own method, or after torch's ``unscale_``; return the norm before clipping."""
    if isinstance(scaler, fxamp.GradScaler):
        return scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(parameters, max_norm)


def on_device(lowering: str = "aot_eager", device: str = "cpu", **arguments: Any) -> fxamp.GradScaler:
    """Return fxamp's scaler with steps that skip on the device."""
    return fxamp.GradScaler(device, growth_interval=INTERVAL, skip="device", step_lowering=lowering, **arguments)


def by_torch(device: str = "cpu") -> Scaler:
    """Return torch's scaler, the reference."""
    return Scaler(device, growth_interval=INTERVAL)


def parts_of(step: CompiledOptimizer) -> list[Any]:
    """The parts of the last program that ``step`` was compiled to."""
    programs = [program for compiled in step._compiled.values() for program in compiled]
    parts: list[Any] = programs[-1].parts
    return parts


def compilations(training: Training) -> int:
    return compilations_of(training.optimizer)


def compilations_of(optimizer: torch.optim.Optimizer) -> int:
    return CompiledOptimizer.of(optimizer).compilations


def assert_agree(ours: Training, theirs: Training, exact: Training | None) -> None:
    """Parameters, saved states and scales agree: no further from float64's than a few roundings of torch's own are.

    Two computations of one formula differ by the roundings on their way. torch's distance from float64, in ``exact``,
    shows how large these are here; one last rounding comes on top, which is all without ``exact``.
    """
    assert ours.scales == theirs.scales
    our, their, true = (saved(training) for training in (ours, theirs, exact or theirs))
    assert our.keys() == their.keys()
    for name, value in our.items():
        expected, wide = their[name], true[name].double()
        assert value.shape == expected.shape and (value.dtype == expected.dtype or not name.startswith("parameter")), (
            name
        )
        if not value.numel() or torch.equal(value.double(), expected.double()):
            continue
        distance = (expected.double() - wide).abs().max().item()
        bound = 4 * distance + torch.finfo(torch.float32).eps * (1 + wide.abs().max().item())
        torch.testing.assert_close(
            value.double(), wide, rtol=0, atol=bound, msg=lambda text, name=name: f"{name}: {text}"
        )


def saved(training: Training) -> dict[str, Tensor]:
    """Parameters, and every number of the optimizer's saved state, by name."""
    leaves = pytree.tree_leaves_with_path(training.optimizer.state_dict()["state"])
    state = {
        pytree.keystr(path): torch.as_tensor(leaf) for path, leaf in leaves if isinstance(leaf, (Tensor, int, float))
    }
    return {f"parameter {at}": parameter.detach() for at, parameter in enumerate(training.parameters)} | state
