"""Runs the contenders: compiles each twice, then steps them in turn, so that drift affects all of them equally."""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fxamp.tools.bench.process import ContenderFailed, Process
from fxamp.tools.bench.train.contenders import CONTENDERS, FLOAT32
from fxamp.tools.bench.train.experiment import Experiment
from fxamp.tools.bench.train.result import Comparison, Measured
from fxamp.tools.bench.train.worker import WARM_UP
from fxamp.tools.common.machine import machine
from fxamp.tools.common.progress import bar

Say = Callable[[str], None]


@dataclass
class _Runner:
    """A contender's process, and its answers so far."""

    name: str
    process: Process | None = None
    cold: Mapping[str, Any] = field(default_factory=dict)
    warm: Mapping[str, Any] = field(default_factory=dict)
    end: Mapping[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    failed: str = ""


def compare(experiment: Experiment, names: Sequence[str], baseline: str, say: Say) -> Comparison:
    """Measure the contenders ``names``, each in a process of its own; ``say`` receives progress.

    A contender that fails leaves the rounds; its result says why. Ctrl-C after the first round ends them: the result's
    experiment then has the number of whole rounds.
    """
    runners = [_Runner(name) for name in names]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fxamp-bench-")))
        for runner in runners:
            _attempt(runner, lambda runner: _start(runner, experiment, folder / runner.name, stack, say))
        with bar("rounds", experiment.rounds, "round") as shown:
            rounds = _rounds(runners, experiment, shown)
        for runner in _alive(runners):
            _attempt(runner, _finish)
    float32 = next((name for name in FLOAT32 if name in names), "")
    experiment = replace(experiment, rounds=rounds)
    return Comparison(
        experiment, machine(experiment.device, experiment.threads), baseline, float32, tuple(map(_result, runners))
    )


def _rounds(runners: Sequence[_Runner], experiment: Experiment, shown: Any) -> int:
    """Step all contenders in turn; return the number of whole rounds, fewer than planned after Ctrl-C."""
    for number in range(experiment.rounds):
        try:
            for runner in _alive(runners):
                _attempt(runner, lambda runner: _round(runner, experiment))
        except KeyboardInterrupt:
            if not number:
                raise
            for runner in runners:
                del runner.seconds[number:], runner.cpu_seconds[number:]
            return number
        shown.update()
    return experiment.rounds


def _alive(runners: Sequence[_Runner]) -> list[_Runner]:
    return [runner for runner in runners if not runner.failed]


def _attempt(runner: _Runner, task: Callable[[_Runner], None]) -> None:
    try:
        task(runner)
    except ContenderFailed as error:
        runner.failed = str(error)


def _start(runner: _Runner, experiment: Experiment, cache: Path, stack: ExitStack, say: Say) -> None:
    """Compile with empty caches in a first process, if there is anything to compile; then start the lasting process."""
    if CONTENDERS[runner.name].compiler:
        say(f"{runner.name}: compiling with empty caches ...")
        with _process(experiment, runner.name, cache) as first:
            runner.cold = first.ask("warm_up")
    say(f"{runner.name}: first steps ...")
    runner.process = stack.enter_context(_process(experiment, runner.name, cache))
    runner.warm = runner.process.ask("warm_up")


def _process(experiment: Experiment, contender: str, cache: Path) -> Process:
    first = {"experiment": experiment.as_dict(), "contender": contender}
    return Process("fxamp.tools.bench.train.worker", first, cache)


def _round(runner: _Runner, experiment: Experiment) -> None:
    assert runner.process is not None
    answer = runner.process.ask("steps", count=experiment.steps)
    runner.seconds.append(answer["seconds"])
    runner.cpu_seconds.append(answer["cpu"])


def _finish(runner: _Runner) -> None:
    assert runner.process is not None
    runner.end = runner.process.ask("observe")


def _result(runner: _Runner) -> Measured:
    label = CONTENDERS[runner.name].label
    if runner.failed:
        return Measured(runner.name, label, failed=runner.failed)
    compiled = bool(CONTENDERS[runner.name].compiler)
    step = statistics.median(runner.seconds)
    return Measured(
        name=runner.name,
        label=label,
        seconds=tuple(runner.seconds),
        cpu_seconds=tuple(runner.cpu_seconds),
        cold=_compiling(runner.cold, step) if compiled else None,
        warm=_compiling(runner.warm, step) if compiled else None,
        cold_cpu=runner.cold["cpu"] if compiled else None,
        warm_cpu=runner.warm["cpu"] if compiled else None,
        hits=runner.warm["hits"],
        misses=runner.warm["misses"],
        graphs=runner.end["graphs"],
        graphs_at_first=runner.warm["graphs"],
        breaks=runner.warm["breaks"],
        losses=tuple(runner.end["losses"]),
        loss_scale=runner.end["loss_scale"],
        observed=runner.end["observed"],
    )


def _compiling(answer: Mapping[str, Any], step: float) -> float:
    """Return the seconds of torch.compile and the first steps minus the time of ordinary steps."""
    seconds: list[float] = [answer["compile_call"], *answer["seconds"]]
    return max(0.0, sum(seconds) - WARM_UP * step)
