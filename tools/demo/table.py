"""The demo's output: one table with both columns, and a sentence on what the numbers mean."""

import statistics
from collections.abc import Callable

from tabulate import tabulate

from fxamp.tools.demo.train import TrainingResult
from fxamp.torch_devices import native_bfloat16


def gap(reference: TrainingResult, other: TrainingResult) -> float:
    """Return the mean over all steps of the distance between the two losses, in nats per token."""
    return statistics.fmean(abs(a - b) for a, b in zip(reference.losses, other.losses, strict=True))


def table(reference: TrainingResult, other: TrainingResult) -> str:
    """Return both runs side by side, as text."""
    rows = [(name, *(describe(run) for run in (reference, other))) for name, describe in _ROWS.items()]
    distance = gap(reference, other)
    rows.append(("loss gap, mean of all steps", "", f"{distance:.4f} ({distance / reference.last:.2%})"))
    if other.scale is not None:
        rows.append(("loss scale at the end", "", f"{other.scale:g}"))
        rows.append(("skipped steps", "", str(other.skipped)))
    rows.append(("steps/s, median", f"{reference.rate:.1f}", f"{other.rate:.1f}"))
    return tabulate(rows, headers=("", reference.label, other.label), disable_numparse=True)


def verdict(reference: TrainingResult, other: TrainingResult, device: str) -> str:
    """Return a sentence on whether this device computes in 16 bits natively, and on the measured speed."""
    ratio = other.rate / reference.rate
    measured = f"fxamp ran {other.rate:.1f} steps/s, float32 {reference.rate:.1f}: {ratio:.2f} times the speed."
    if not _casts(other):
        return f"Nothing was cast: both columns computed in float32. {measured}"
    if device == "cpu" and not native_bfloat16("cpu"):
        return (
            "This CPU has no bfloat16 units (avx512_bf16, amx_bf16), so 16-bit arithmetic gains no speed on it: "
            f"only the loss curve is meaningful here. {measured}"
        )
    return measured


def _casts(run: TrainingResult) -> int:
    return sum(record.casts for record in run.records)


def _by_dtype(run: TrainingResult) -> str:
    totals: dict[str, int] = {}
    for record in run.records:
        for dtype, count in record.ops_by_dtype.items():
            totals[dtype] = totals.get(dtype, 0) + count
    return ", ".join(f"{count} {dtype}" for dtype, count in sorted(totals.items(), key=lambda item: -item[1])) or "-"


_ROWS: dict[str, Callable[[TrainingResult], str]] = {
    "policy": lambda run: ", ".join(dict.fromkeys(record.policy for record in run.records)) or "none",
    "why": lambda run: ", ".join(dict.fromkeys(record.chosen for record in run.records)) or "plain torch.compile",
    "graphs": lambda run: str(run.graphs),
    "ops": lambda run: str(sum(record.ops for record in run.records)) if run.records else "-",
    "ops by result": _by_dtype,
    "casts inserted": lambda run: str(_casts(run)),
    "first step, compiling included": lambda run: f"{run.compiling:.1f} s",
    "first loss": lambda run: f"{run.losses[0]:.4f}",
    "last loss, mean of 10 steps": lambda run: f"{run.last:.4f}",
    "loss on held-out text": lambda run: f"{run.held_out:.4f}",
}
