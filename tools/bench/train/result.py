"""What was measured, as plain values: what ``--json`` prints and tables show."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from fxamp.tools.bench.report import Spread, spread
from fxamp.tools.bench.train.experiment import Experiment


@dataclass(frozen=True)
class Measured:
    """One contender's numbers.

    ``seconds``: of a step, by start and round. ``cpu_seconds``: CPU time of the process for it, which other work on the
    machine disturbs less. ``host_seconds``: of a step's calls on an idle GPU; no step there is shorter.
    ``cold`` and ``warm``: seconds of compiling with empty caches, and in the second start with those caches; None for
    eager code. ``cold_cpu`` and ``warm_cpu``: CPU time of these processes from their start until the first steps are
    done, compilers included. ``hits`` and ``misses``: of graphs in torch's compile caches, in the second start.
    ``graphs``: compiled graphs at the end, of which ``graphs_at_first`` were compiled by the first steps; ``breaks``:
    graph breaks. ``losses``: of every step of the first start. ``gradient_error``: as
    :func:`~fxamp.tools.bench.train.gradient.gradient_error` returns it.
    ``observed``: the numbers of :func:`~fxamp.tools.bench.train.observe.observe`. ``notes``: what a reader must know
    about them. ``failed``: why there are no numbers, ``""`` if there are.
    """

    name: str
    label: str
    seconds: tuple[tuple[float, ...], ...] = ()
    cpu_seconds: tuple[tuple[float, ...], ...] = ()
    host_seconds: tuple[tuple[float, ...], ...] = ()
    cold: float | None = None
    warm: float | None = None
    cold_cpu: float | None = None
    warm_cpu: float | None = None
    hits: int = 0
    misses: int = 0
    graphs: int = 0
    graphs_at_first: int = 0
    breaks: int = 0
    losses: tuple[float, ...] = ()
    loss_scale: float | None = None
    gradient_error: float | None = None
    observed: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    failed: str = ""


@dataclass(frozen=True)
class Ratio:
    """The time of a step over the baseline's: the spread of all rounds, and the median of each start."""

    spread: Spread
    starts: tuple[float, ...]

    @property
    def doubt(self) -> float:
        """How far apart the starts' medians are, as a share of their middle."""
        return (max(self.starts) - min(self.starts)) / self.spread.median


@dataclass(frozen=True)
class Comparison:
    """All contenders on one machine; ratios are taken to ``baseline``, losses compared with ``float32``.

    ``notes``: what a reader must know about all of them. ``interrupted``: whether Ctrl-C ended the rounds early.
    """

    experiment: Experiment
    machine: Mapping[str, str]
    baseline: str
    float32: str
    contenders: tuple[Measured, ...]
    notes: tuple[str, ...] = ()
    interrupted: bool = False

    def named(self, name: str) -> Measured | None:
        """The contender of that name, None if it is not there or failed."""
        return next(
            (contender for contender in self.contenders if contender.name == name and not contender.failed), None
        )

    def step(self, measured: Measured) -> float:
        """Seconds of a step: the median of all rounds of a contender that has some."""
        return statistics.median(chain.from_iterable(measured.seconds))

    def time_ratio(self, measured: Measured, name: str = "seconds") -> Ratio | None:
        """Time of a step over the baseline's, taken round by round: both were measured within seconds of each other.

        ``name``: "seconds", or "cpu_seconds". None if either was not measured.
        """
        base = self.named(self.baseline)
        mine, theirs = getattr(measured, name), () if base is None else getattr(base, name)
        if not mine or not theirs:
            return None
        ratios = [[a / b for a, b in zip(*starts, strict=True)] for starts in zip(mine, theirs, strict=True)]
        return Ratio(spread(list(chain.from_iterable(ratios))), tuple(statistics.median(start) for start in ratios))

    def ratio(self, measured: Measured, name: str) -> float | None:
        """A number of ``observed``, or the field ``name``, over the baseline's; None without either, or over zero."""
        base = self.named(self.baseline)
        mine, theirs = value_of(measured, name), None if base is None else value_of(base, name)
        return None if mine is None or not theirs else mine / theirs

    def loss_distance(self, measured: Measured) -> float | None:
        """The last loss less float32's."""
        reference = self.named(self.float32)
        if reference is None or not measured.losses:
            return None
        return measured.losses[-1] - reference.losses[-1]

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        contenders = [asdict(contender) | self._derived(contender) for contender in self.contenders]
        return {"version": 2, **asdict(self), "contenders": contenders}

    def _derived(self, contender: Measured) -> dict[str, Any]:
        ratio, cpu_ratio = self.time_ratio(contender), self.time_ratio(contender, "cpu_seconds")
        return {
            "step": None if contender.failed else asdict(spread(list(chain.from_iterable(contender.seconds)))),
            "step_ratio": None if ratio is None else asdict(ratio),
            "cpu_ratio": None if cpu_ratio is None else asdict(cpu_ratio),
            "ratios": {name: self.ratio(contender, name) for name in RATIOS},
            "loss_distance": self.loss_distance(contender),
        }


#: The numbers that are also given as ratios to the baseline's.
RATIOS = (
    *("memory_peak", "memory_step", "memory_kept", "gradient_error"),
    *("cold", "warm", "cold_cpu", "warm_cpu", "casts", "cast_bytes"),
)


def value_of(measured: Measured, name: str) -> float | None:
    """A number by its name: of ``observed``, or a field; None if there is none."""
    value = measured.observed.get(name, getattr(measured, name, None))
    return None if value is None else float(value)
