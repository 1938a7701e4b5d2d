"""A comparison as a table, for a terminal or as Markdown: ratios, with absolute numbers beside them."""

from collections.abc import Callable, Sequence

from fxamp.tools.bench.report import Report, drawn, spread
from fxamp.tools.bench.train.result import Comparison, Measured, value_of
from fxamp.tools.common.interrupt import SoFar

_Cell = Callable[[Comparison, Measured], str]
MISSING = "-"


def table(comparison: Comparison, markdown: bool = False) -> str:
    """Return title, table and notes. Each contender is a column; ``-`` marks a number that cannot be measured."""
    working = [contender for contender in comparison.contenders if not contender.failed]
    rows = [(name, *(cell(comparison, contender) for contender in working)) for name, cell in _ROWS.items()]
    known = [row for row in rows if set(row[1:]) != {MISSING}]
    lines = drawn(known, ("", *(contender.label for contender in working)), markdown)
    return "\n\n".join([_title(comparison), lines, _notes(comparison, markdown)])


def reported(comparison: Comparison, rounds: int) -> Report:
    """Return the report of a comparison. Raises SoFar with the table if it has fewer rounds than planned."""
    if comparison.experiment.rounds < rounds:
        raise SoFar(table(comparison))
    failed = tuple(contender.name for contender in comparison.contenders if contender.failed)
    return Report(comparison.as_dict(), table(comparison), table(comparison, markdown=True), failed)


def _title(comparison: Comparison) -> str:
    """Return a line with the model, the machine and the versions."""
    experiment, facts = comparison.experiment, dict(comparison.machine)
    versions = ", ".join(f"{name} {version}" for name, version in facts.items() if name != "device")
    lowered = "" if experiment.lowering == "inductor" else f", lowered by {experiment.lowering}"
    clipped = "" if experiment.max_norm is None else f" clipped to {experiment.max_norm:g}"
    sizes = [experiment.size, *(f"{name} {number}" for name, number in experiment.changed.items())]
    sized = ", ".join(filter(None, sizes))
    what = f"{experiment.model} ({sized}), {experiment.optimizer}{clipped}, dtype {experiment.dtype}{lowered}"
    return f"{what}, on {facts['device']}; {versions}"


def _notes(comparison: Comparison, markdown: bool) -> str:
    experiment = comparison.experiment
    base = comparison.named(comparison.baseline)
    notes = [
        f"Ratios are to {base.label}. Time: median [quartiles] of {experiment.rounds} rounds of {experiment.steps} "
        "steps each, the contenders in turn, each ratio taken within its round."
        if base
        else f"No ratios: the baseline {comparison.baseline} gave no numbers.",
    ]
    how = {contender.observed["memory_how"] for contender in comparison.contenders if contender.observed}
    notes += [f"Memory: tensors, by {', '.join(sorted(how))}."] if how else []
    notes += [f"{contender.label}: {note}" for contender in comparison.contenders for note in contender.notes]
    notes += [
        f"{contender.label} failed: {contender.failed}" for contender in comparison.contenders if contender.failed
    ]
    return "\n".join(f"- {note}" if markdown else note for note in notes)


def _time_ratio(name: str) -> _Cell:
    def cell(comparison: Comparison, contender: Measured) -> str:
        ratio = comparison.time_ratio(contender, name)
        return MISSING if ratio is None else str(ratio)

    return cell


def _milliseconds(name: str) -> _Cell:
    def cell(comparison: Comparison, contender: Measured) -> str:
        seconds: Sequence[float] = getattr(contender, name)
        return str(spread([1e3 * value for value in seconds])) if seconds else MISSING

    return cell


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


def _cached(comparison: Comparison, contender: Measured) -> str:
    return f"{contender.hits} of {contender.hits + contender.misses}" if contender.hits + contender.misses else MISSING


def _loss(comparison: Comparison, contender: Measured) -> str:
    return f"{contender.losses[-1]:.4f}, step {len(contender.losses)}" if contender.losses else MISSING


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


def _seconds(value: float) -> str:
    return f"{value:.1f} s"


def _count(value: float) -> str:
    return f"{value:g}"


_ROWS: dict[str, _Cell] = {
    "step, ratio": _time_ratio("seconds"),
    "step, ms": _milliseconds("seconds"),
    "its CPU time, ratio": _time_ratio("cpu_seconds"),
    "its CPU time, ms": _milliseconds("cpu_seconds"),
    "peak memory": _ratio("memory_peak", size),
    "held for the backward": _ratio("memory_activations", size),
    "compiling, empty caches": _ratio("cold", _seconds),
    "compiling, warm caches": _ratio("warm", _seconds),
    "CPU time until then, empty": _ratio("cold_cpu", _seconds),
    "CPU time until then, warm": _ratio("warm_cpu", _seconds),
    "found in warm caches": _cached,
    "graphs": _graphs,
    "graph breaks": _plain("breaks", _count),
    "casts in the forward": _plain("casts", _count),
    "bytes cast there": _plain("cast_bytes", size),
    "host syncs a step": _plain("host_syncs", _count),
    "loss": _loss,
    "loss less float32's": _distance,
    "loss scale": _plain("loss_scale", _count),
}
