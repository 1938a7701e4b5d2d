"""A comparison as tables, for a terminal or as Markdown: ratios, next to absolute numbers."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from fxamp.tools.bench.report import Report, drawn
from fxamp.tools.bench.train.result import Comparison, Measured, Ratio, value_of
from fxamp.tools.common.interrupt import SoFar
from fxamp.tools.common.machine import QUIET

_Cell = Callable[[Comparison, Measured], str]
MISSING = "-"


def table(comparison: Comparison, markdown: bool = False) -> str:
    """Return title, tables and notes. Each contender is a row; ``-`` marks a number that cannot be measured."""
    tables = (_drawn(comparison, columns, markdown) for columns in (_STEP, _COMPILING))
    return "\n\n".join([title(comparison), *filter(None, tables), _notes(comparison, markdown)])


def _drawn(comparison: Comparison, columns: Mapping[str, _Cell], markdown: bool) -> str:
    """Return a table of the columns that any contender has a number for; "" if there are none."""
    working = [contender for contender in comparison.contenders if not contender.failed]
    cells = {name: [cell(comparison, contender) for contender in working] for name, cell in columns.items()}
    known = {name: column for name, column in cells.items() if set(column) - {MISSING}}
    if not known:
        return ""
    rows = zip([contender.label for contender in working], *known.values(), strict=True)
    return drawn(list(rows), ("", *known), markdown)


def reported(comparison: Comparison) -> Report:
    """Return the report of a comparison. Raises SoFar with the table if it was interrupted."""
    if comparison.interrupted:
        raise SoFar(table(comparison))
    failed = tuple(contender.name for contender in comparison.contenders if contender.failed)
    return Report(comparison.as_dict(), table(comparison), table(comparison, markdown=True), failed)


def title(comparison: Comparison) -> str:
    """Return a line with the model, the machine and the versions."""
    experiment = comparison.experiment
    lowered = "" if experiment.lowering == "inductor" else f", lowered by {experiment.lowering}"
    clipped = "" if experiment.max_norm is None else f" clipped to {experiment.max_norm:g}"
    sizes = [experiment.size, *(f"{name} {number}" for name, number in experiment.changed.items())]
    sized = ", ".join(filter(None, sizes))
    what = f"{experiment.model} ({sized}), {experiment.optimizer}{clipped}, dtype {experiment.dtype}{lowered}"
    return f"{what}, on {comparison.machine['device']}; {versions(comparison)}"


def versions(comparison: Comparison) -> str:
    """Return the versions of torch, Python and Triton."""
    return ", ".join(
        f"{name} {version}" for name, version in comparison.machine.items() if name not in ("device", "load")
    )


def _notes(comparison: Comparison, markdown: bool) -> str:
    how = {contender.observed["memory_how"] for contender in comparison.contenders if contender.observed}
    notes = [_about_time(comparison), *busy(comparison)]
    if how:
        notes.append(
            f"Memory: that of tensors, by {', '.join(sorted(how))}; step only: its peak besides parameters, optimizer "
            "state and batches, gradients included; kept: saved by the forward for the backward."
        )
    if any(contender.gradient_error is not None for contender in comparison.contenders):
        notes.append("Gradient error: for the first batch at the initial weights, against the same model in float64.")
    if steps := max(len(contender.losses) for contender in comparison.contenders):
        notes.append(f"Loss: at step {steps} of the first start. Casts: in the forward. Compiling: without steps.")
    notes += comparison.notes
    notes += [f"{contender.label}: {note}" for contender in comparison.contenders for note in contender.notes]
    notes += [
        f"{contender.label} failed: {contender.failed}" for contender in comparison.contenders if contender.failed
    ]
    return "\n".join(f"- {note}" if markdown else note for note in notes)


def _about_time(comparison: Comparison) -> str:
    base, steps = comparison.named(comparison.baseline), comparison.experiment.steps
    if base is None:
        return f"No ratios: the baseline {comparison.baseline} gave no numbers."
    rounds = [len(start) for start in base.seconds]
    return (
        f"Ratios are to {base.label}. Time: median [quartiles] of {sum(rounds)} rounds of {steps} steps in "
        f"{len(rounds)} starts; contenders step in turn, and each ratio is within a round. Then each start's median."
    )


def busy(comparison: Comparison) -> list[str]:
    """Return a note on the machine's load if it had other work."""
    before = float(comparison.machine.get("load", 0))
    return [f"The machine was busy: its load was {before:.1f} before the first start."] if before > QUIET else []


def _time_ratio(show: Callable[[Ratio], str], name: str = "seconds") -> _Cell:
    def cell(comparison: Comparison, contender: Measured) -> str:
        ratio = comparison.time_ratio(contender, name)
        return MISSING if ratio is None else show(ratio)

    return cell


def milliseconds(seconds: Sequence[Sequence[float]]) -> str:
    """Return the median of the times of steps, by start and round."""
    every = [*chain.from_iterable(seconds)]
    if not every:
        return MISSING
    median = 1e3 * statistics.median(every)
    return f"{median:.0f}" if median >= 100 else f"{median:.3g}"


def _ratio(name: str, show: Callable[[float], str]) -> _Cell:
    """Return a formatter: a ratio, with the number itself in brackets."""

    def cell(comparison: Comparison, contender: Measured) -> str:
        value, ratio = value_of(contender, name), comparison.ratio(contender, name)
        if value is None:
            return MISSING
        return show(value) if ratio is None else f"{ratio:.2f} ({show(value)})"

    return cell


def _plain(name: str, show: Callable[[float], str]) -> _Cell:
    def cell(comparison: Comparison, contender: Measured) -> str:
        value = value_of(contender, name)
        return MISSING if value is None else show(value)

    return cell


def _graphs(comparison: Comparison, contender: Measured) -> str:
    later = contender.graphs - contender.graphs_at_first
    return f"{contender.graphs}" + (f", {later} of them late" if later else "")


def _distance(comparison: Comparison, contender: Measured) -> str:
    distance = comparison.loss_distance(contender)
    return MISSING if distance is None else f"{distance:+.1e}" if distance else "0"


def size(count: float) -> str:
    """Return a size for people to read: ``"1.5 MB"``."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


_seconds, _count, _error = "{:.1f} s".format, "{:g}".format, "{:.1e}".format

_STEP: dict[str, _Cell] = {
    "step, ms": lambda _, own: milliseconds(own.seconds),
    "ratio": _time_ratio(lambda ratio: str(ratio.spread)),
    "per start": _time_ratio(lambda ratio: " ".join(f"{start:.2f}" for start in ratio.starts)),
    "CPU time": _time_ratio(lambda ratio: f"{ratio.spread.median:.2f}", "cpu_seconds"),
    "host, ms": lambda whole, own: milliseconds(own.host_seconds) if whole.experiment.device == "cuda" else MISSING,
    "peak memory": _ratio("memory_peak", size),
    "step only": _ratio("memory_step", size),
    "kept": _ratio("memory_kept", size),
    "gradient error": _ratio("gradient_error", _error),
    "loss": lambda _, own: f"{own.losses[-1]:.4f}" if own.losses else MISSING,
    "loss - float32": _distance,
}
_COMPILING: dict[str, _Cell] = {
    "compiling": _ratio("cold", _seconds),
    "its CPU time": _ratio("cold_cpu", _seconds),
    "with caches": _ratio("warm", _seconds),
    "CPU time": _ratio("warm_cpu", _seconds),
    "cache hits": lambda _, own: f"{own.hits} of {own.hits + own.misses}" if own.hits + own.misses else MISSING,
    "graphs": _graphs,
    "breaks": _plain("breaks", _count),
    "casts": _plain("casts", _count),
    "bytes cast": _plain("cast_bytes", size),
    "host syncs": _plain("host_syncs", _count),
    "loss scale": _plain("loss_scale", _count),
}
