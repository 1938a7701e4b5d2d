"""Runs the contenders: compiles each twice, then steps them in turn."""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from fxamp.tools.bench.process import Process
from fxamp.tools.bench.train import worker
from fxamp.tools.bench.train.experiment import FLOAT32, Contender, Experiment
from fxamp.tools.bench.train.result import Comparison, Measured
from fxamp.tools.bench.train.turns import Runner, take_turns
from fxamp.tools.common.machine import machine

Say = Callable[[str], None]


def compare(experiment: Experiment, names: Sequence[str], baseline: str, say: Say) -> Comparison:
    """Measure the contenders ``names``, each in a process of its own; ``say`` receives progress.

    A contender that fails leaves the rounds; its result says why. Ctrl-C after the first round ends them: the result's
    experiment then has the number of whole rounds.
    """
    runners = [Runner(name) for name in names]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fxamp-bench-")))
        for runner in runners:
            runner.attempt(lambda runner: _start(runner, experiment, folder / runner.name, stack, say))
        rounds = take_turns(runners, experiment.rounds, experiment.steps)
        for runner in runners:
            runner.attempt(lambda runner: runner.ask(worker.end))
    float32 = next((name for name in FLOAT32 if name in names), "")
    results = tuple(_result(runner, experiment.contenders[runner.name]) for runner in runners)
    facts = machine(experiment.device, experiment.threads)
    return Comparison(replace(experiment, rounds=rounds), facts, baseline, float32, results)


def _start(runner: Runner, experiment: Experiment, cache: Path, stack: ExitStack, say: Say) -> None:
    """Compile with empty caches in a first process, if there is anything to compile; then start the lasting process."""
    if experiment.contenders[runner.name].compiler:
        say(f"{runner.name}: compiling with empty caches ...")
        with start_process(experiment, runner.name, cache) as first:
            runner.answers["cold"] = first.ask(worker.warm_up)
    say(f"{runner.name}: first steps ...")
    runner.process = stack.enter_context(start_process(experiment, runner.name, cache))
    runner.ask(worker.warm_up)


def start_process(experiment: Experiment, contender: str, cache: Path) -> Process:
    """Start the process of one contender. Raises ContenderFailed if it cannot train."""
    return Process(worker.start, experiment, contender, cache=cache)


def _result(runner: Runner, contender: Contender) -> Measured:
    if runner.failed:
        return Measured(runner.name, contender.label, failed=runner.failed)
    warm, end = runner.answers["warm_up"], runner.answers["end"]
    seconds = tuple(answer["seconds"] for answer in runner.rounds)
    result = Measured(
        name=runner.name,
        label=contender.label,
        seconds=seconds,
        cpu_seconds=tuple(answer["cpu"] for answer in runner.rounds),
        hits=warm["hits"],
        misses=warm["misses"],
        graphs=end["graphs"],
        graphs_at_first=warm["graphs"],
        breaks=warm["breaks"],
        losses=tuple(end["losses"]),
        loss_scale=end["loss_scale"],
        observed=end["observed"],
        notes=tuple(end["notes"]),
    )
    if not contender.compiler:
        return result
    cold, step = runner.answers["cold"], statistics.median(seconds)
    return replace(
        result,
        cold=_compiling(cold, step),
        warm=_compiling(warm, step),
        cold_cpu=cold["cpu"],
        warm_cpu=warm["cpu"],
    )


def _compiling(answer: Mapping[str, Any], step: float) -> float:
    """Return the seconds of torch.compile and the first steps minus the time of ordinary steps."""
    seconds: list[float] = [answer["compile_call"], *answer["seconds"]]
    return max(0.0, sum(seconds) - worker.WARM_UP * step)
