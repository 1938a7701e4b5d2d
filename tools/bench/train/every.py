"""``fxamp-bench train --every``: one table of all large models under torch and under each kind of policy."""

import argparse
from collections.abc import Callable, Sequence
from datetime import date

from fxamp.errors import OptionError
from fxamp.tools.bench.report import Report, drawn
from fxamp.tools.bench.train.experiment import AUTOCAST, FLOAT32_COMPILED, Experiment
from fxamp.tools.bench.train.result import Comparison, Measured, value_of
from fxamp.tools.bench.train.table import MISSING, busy, milliseconds, size, table, versions
from fxamp.tools.common.interrupt import so_far

#: The policies of the table, after the name of the device and the dtype.
KINDS = ("", "-fast", "-lean", "-leanest")

#: The figures of a step in a cell, after its time.
_NUMBERS = ("memory_step", "gradient_error")


def report_every(
    options: argparse.Namespace,
    experiment_of: Callable[[argparse.Namespace, str], Experiment],
    say: Callable[[str], None],
) -> Report:
    """Measure every model under float32, autocast, and the policies that were named, or each kind of them.

    Raises OptionError for options that name one model or other contenders.
    """
    from fxamp.tools.bench.models import EVERY
    from fxamp.tools.bench.train.measure import compare

    for option in ("model", "set", "contenders", "baseline", "chart"):
        if getattr(options, option):
            raise OptionError(
                f"--{option} is for one model; accepted with --every: --policy, --layers, --size, --dtype, --rounds"
            )
    dtype = "bfloat16" if options.dtype in (None, "auto") else options.dtype
    options.policy = options.policy or [f"{options.device}-{dtype}{kind}" for kind in KINDS]
    experiments = [experiment_of(options, model) for model in EVERY]
    done: list[Comparison] = []
    with so_far(lambda: _tables(done) if done else ""):
        for experiment in experiments:
            say(f"{experiment.model} ...")
            names = [FLOAT32_COMPILED, AUTOCAST, *experiment.policies]
            comparison = compare(experiment, names, AUTOCAST, say)
            if comparison.interrupted:
                raise KeyboardInterrupt
            done.append(comparison)
    document = {"version": 2, "comparisons": [comparison.as_dict() for comparison in done]}
    failed = tuple(
        f"{comparison.experiment.model}: {contender.name}"
        for comparison in done
        for contender in comparison.contenders
        if contender.failed
    )
    return Report(document, _tables(done), summary(done, markdown=True), failed)


def _tables(done: Sequence[Comparison]) -> str:
    return "\n\n\n".join([summary(done), *(table(comparison) for comparison in done)])


def summary(done: Sequence[Comparison], markdown: bool = False) -> str:
    """Return one table of at least one comparison, all with the same contenders, and how it was measured."""
    labels = [contender.label for contender in done[0].contenders]
    rows = [
        (f"`{one.experiment.model}`" if markdown else one.experiment.model, *(_cell(one, c) for c in one.contenders))
        for one in done
    ]
    return f"{drawn(rows, ('', *labels), markdown)}\n\n{_about(done)}"


def _cell(comparison: Comparison, contender: Measured) -> str:
    """Return time, memory and error: of the baseline themselves, of others over it."""
    time = comparison.time_ratio(contender)
    if contender.failed or time is None:
        return "failed"
    if contender.name == comparison.baseline:
        memory, error = (value_of(contender, name) for name in _NUMBERS)
        shown = (MISSING if memory is None else size(memory), MISSING if error is None else f"{error:.1e}")
        return " / ".join((f"{milliseconds(contender.seconds)} ms", *shown))
    ratios = (time.spread.median, *(comparison.ratio(contender, name) for name in _NUMBERS))
    return " / ".join(MISSING if ratio is None else f"{ratio:.2f}" for ratio in ratios)


def _about(done: Sequence[Comparison]) -> str:
    first = done[0]
    experiment = first.experiment
    ratios = [ratio for one in done for contender in one.contenders if (ratio := one.time_ratio(contender))]
    doubt = max((ratio.doubt for ratio in ratios), default=0.0)
    depth = "".join(f"{number} layers or stages, " for number in experiment.changed.values())
    lines = [
        "In each cell: time of a step / its peak memory besides parameters, optimizer state and batches / error of the "
        "gradient against float64; for torch.compile + autocast in numbers, for the others as ratios to these.",
        f"Measured on {first.machine['device']}, {date.today()}; {versions(first)}. Size {experiment.size}, "
        f"{depth}{experiment.optimizer}; {experiment.starts} starts of {experiment.rounds} rounds of "
        f"{experiment.steps} steps, in turn. A contender's starts differ by at most {doubt:.0%}.",
        *busy(first),
    ]
    return "\n".join(lines)
