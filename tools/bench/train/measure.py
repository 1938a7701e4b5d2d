"""Runs the contenders: starts each several times, the first time with empty caches, and steps them in turn."""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from fxamp.tools.bench.process import ContenderFailed, Process
from fxamp.tools.bench.train import worker
from fxamp.tools.bench.train.experiment import FLOAT32, PARAMETERS, Contender, Experiment
from fxamp.tools.bench.train.result import Comparison, Measured
from fxamp.tools.bench.train.turns import Runner, order, take_turns
from fxamp.tools.common.machine import load, machine

Say = Callable[[str], None]


def compare(experiment: Experiment, names: Sequence[str], baseline: str, say: Say) -> Comparison:
    """Measure the contenders ``names``, each in processes of its own; ``say`` receives progress.

    A contender that fails leaves the rounds; its result says why. Ctrl-C after the first round ends them: the result is
    then that of the whole rounds, and ``interrupted``.
    """
    facts = {**machine(experiment.device, experiment.threads), "load": f"{load():.1f}"}
    runners = [Runner(name) for name in names]
    with tempfile.TemporaryDirectory(prefix="fxamp-bench-") as place:
        folder = Path(place)
        reference, without = _reference(experiment, folder / "reference.pt", say)
        starts = range(experiment.starts)
        finished = all(_start(runners, number, experiment, folder, reference, say) for number in starts)
    float32 = next((name for name in FLOAT32 if name in names), "")
    results = tuple(_result(runner, experiment.contenders[runner.name]) for runner in runners)
    notes = [f"The gradient's error is not measured: {without}."] if without else []
    if experiment.jobs > 1:
        notes.append(f"{experiment.jobs} contenders compiled at once: compile times include waiting for each other.")
    return Comparison(experiment, facts, baseline, float32, results, tuple(notes), interrupted=not finished)


def _reference(experiment: Experiment, file: Path, say: Say) -> tuple[Path | None, str]:
    """Write the gradient in float64 to ``file``; return the file, or None and why there is none."""
    from fxamp.tools.bench.train.gradient import MOST_PARAMETERS, Reference

    if experiment.model == PARAMETERS:
        return None, ""
    say("the gradient in float64 ...")
    try:
        with Process(Reference, experiment) as process:
            if process.ask(Reference.write, file):
                return file, ""
    except ContenderFailed as error:
        return None, str(error)
    return None, f"the model has more than {MOST_PARAMETERS / 1e6:.0f} million parameters, too many for float64"


def _start(
    runners: Sequence[Runner], number: int, experiment: Experiment, folder: Path, reference: Path | None, say: Say
) -> bool:
    """Start all contenders, let them take their turns, and end their processes; return False after Ctrl-C."""
    try:
        with ExitStack() as stack:

            def start(runner: Runner) -> None:
                """Start a process, which compiles in its first steps: at first with empty caches, then with those."""
                say(f"{runner.name}, start {number + 1} of {experiment.starts} ...")
                cache = folder / str(list(experiment.contenders).index(runner.name))
                process = Process(worker.start, experiment, runner.name, cache=cache)
                runner.started(stack.enter_context(process))
                runner.ask(worker.warm_up)

            _each(order(runners, number), start, experiment.jobs)
            whole = take_turns(runners, experiment.rounds, experiment.steps, f"start {number + 1}")
            if number == 0:
                _each(runners, lambda runner: runner.ask(worker.end, reference=reference), experiment.jobs)
    except KeyboardInterrupt:
        if number == 0:
            raise
        for runner in runners:
            del runner.answers[number:], runner.rounds[number:]
        return False
    return whole


def _each(runners: Sequence[Runner], task: Callable[[Runner], object], jobs: int) -> None:
    """Let each do the task, ``jobs`` of them at once."""
    if jobs == 1:
        for runner in runners:
            runner.attempt(task)
        return
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda runner: runner.attempt(task), runners))


def _result(runner: Runner, contender: Contender) -> Measured:
    if runner.failed:
        return Measured(runner.name, contender.label, failed=runner.failed)
    first, *later = [answers["warm_up"] for answers in runner.answers]
    numbers: dict[str, Any] = {
        name: tuple(tuple(answer[name] for answer in rounds) for rounds in runner.rounds)
        for name in ("seconds", "cpu_seconds", "host_seconds")
    }
    numbers |= {"graphs_at_first": first["graphs"], "breaks": first["breaks"], **runner.answers[0]["end"]}
    result = Measured(runner.name, contender.label, **numbers)
    if not contender.compiler:
        return result
    step = statistics.median(chain.from_iterable(result.seconds))
    result = replace(result, cold=_compiling(first, step), cold_cpu=first["cpu"])
    if not later:
        return result
    warm = later[0]
    hits = {"hits": warm["hits"], "misses": warm["misses"]}
    return replace(result, warm=_compiling(warm, step), warm_cpu=warm["cpu"], **hits)


def _compiling(answer: Mapping[str, Any], step: float) -> float:
    """Return the seconds of torch.compile and the first steps minus the time of ordinary steps."""
    seconds: list[float] = [answer["compile_call"], *answer["seconds"]]
    return max(0.0, sum(seconds) - worker.WARM_UP * step)
