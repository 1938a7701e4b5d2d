"""The demo's output: one table with a column for each run, and a sentence on what the numbers mean."""

import statistics
from collections.abc import Callable, Sequence

from tabulate import tabulate

from fxamp.tools.demo.train import TrainingResult
from fxamp.torch_devices import native_bfloat16

_Cell = Callable[[TrainingResult, TrainingResult], str]


def gap(reference: TrainingResult, other: TrainingResult) -> float:
    """Return the mean over all steps of the distance between the two losses, in nats per token."""
    return statistics.fmean(abs(a - b) for a, b in zip(reference.losses, other.losses, strict=True))


def table(runs: Sequence[TrainingResult]) -> str:
    """Return the runs side by side, as text; the first is what the others are compared with."""
    rows = [(name, *(describe(runs[0], run) for run in runs)) for name, describe in _ROWS.items()]
    shown = [row for row in rows if any(row[1:])]
    return tabulate(shown, headers=("", *(run.label for run in runs)), disable_numparse=True)


def verdict(runs: Sequence[TrainingResult], device: str) -> str:
    """Return one sentence: what fxamp gained over the first run, in speed and memory, and at what loss."""
    reference, plain, lean = runs
    losses = ", ".join(f"{run.held_out:.2f}" for run in runs)
    kept = f"{lean.memory.kept / reference.memory.kept:.2f} of float32's memory"
    end = f"a lean policy keeps activations in {kept} (loss on unseen text: {losses})."
    if not _casts(plain):
        return f"Nothing was cast, so fxamp's column computes as float32's does; {end}"
    if device == "cpu" and not native_bfloat16("cpu"):
        units = "no units for bfloat16 (avx512_bf16, amx_bf16)"
        return f"This CPU has {units}, so 16 bits cannot be faster here, but {end}"
    speed = plain.rate / reference.rate
    fast = f"{speed:.1f} times as fast as float32" if speed >= 1 else f"at {speed:.2f} of float32's speed"
    return f"One changed line trains this GPT {fast}, and {end}"


def _casts(run: TrainingResult) -> int:
    return sum(record.casts for record in run.records)


def _by_dtype(run: TrainingResult) -> str:
    totals: dict[str, int] = {}
    for record in run.records:
        for dtype, count in record.ops_by_dtype.items():
            totals[dtype] = totals.get(dtype, 0) + count
    return ", ".join(f"{count} {dtype}" for dtype, count in sorted(totals.items(), key=lambda item: -item[1])) or "-"


def _gap(reference: TrainingResult, run: TrainingResult) -> str:
    distance = gap(reference, run)
    return "" if run is reference else f"{distance:.4f} ({distance / reference.last:.2%})"


def _against_first(number: Callable[[TrainingResult], float], show: Callable[[float], str]) -> _Cell:
    def cell(first: TrainingResult, run: TrainingResult) -> str:
        own = number(run)
        return show(own) if run is first else f"{show(own)} ({own / number(first):.2f} times)"

    return cell


def _alone(describe: Callable[[TrainingResult], str]) -> _Cell:
    return lambda _, run: describe(run)


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.3g} MB"


#: The text of each row for a run, compared with the first run.
_ROWS: dict[str, _Cell] = {
    "policy": _alone(lambda run: ", ".join(dict.fromkeys(record.policy for record in run.records)) or "none"),
    "why": _alone(
        lambda run: ", ".join(dict.fromkeys(record.chosen for record in run.records)) or "plain torch.compile"
    ),
    "graphs": _alone(lambda run: str(run.graphs)),
    "ops": _alone(lambda run: str(sum(record.ops for record in run.records)) if run.records else "-"),
    "ops by result": _alone(_by_dtype),
    "casts inserted": _alone(lambda run: str(_casts(run))),
    "first step, compiling included": _alone(lambda run: f"{run.compiling:.1f} s"),
    "first loss": _alone(lambda run: f"{run.losses[0]:.4f}"),
    "last loss, mean of 10 steps": _alone(lambda run: f"{run.last:.4f}"),
    "loss on held-out text": _alone(lambda run: f"{run.held_out:.4f}"),
    "loss gap, mean of all steps": _gap,
    "loss scale at the end": _alone(lambda run: "" if run.scale is None else f"{run.scale:g}"),
    "skipped steps": _alone(lambda run: "" if run.skipped is None else str(run.skipped)),
    "peak memory": _against_first(lambda run: run.memory.peak, _megabytes),
    "kept for the backward": _against_first(lambda run: run.memory.kept, _megabytes),
    "steps/s, median": _against_first(lambda run: run.rate, "{:.3g}".format),
}
