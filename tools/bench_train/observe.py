"""What one contender's steps do, apart from time: counted in steps of their own, after the measured ones."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fxamp import kernels
from fxamp.backend.report import Report
from fxamp.kernels.plan import Asked, Gradient, bytes_moved, make_plan
from fxamp.listing.totals import totals
from fxamp.tools.bench_train.counted_ops import Casts, CountedOps
from fxamp.tools.bench_train.memory import measure_memory
from fxamp.tools.bench_train.training import Training

_SYNC_WARNING = "synchronizing CUDA operation"


@dataclass(frozen=True)
class Observed:
    """Counts of one step; None where they cannot be had.

    ``casts`` and ``cast_bytes``: of the forward. fxamp's are those of its graphs, as ``fxamp.report`` lists them; eager
    autocast's are counted as they run; what torch.compile makes of autocast is not visible. ``backward_casts``: those
    that eager code runs there. ``host_syncs``: on cuda what torch.cuda.set_sync_debug_mode reports, elsewhere the
    values that ops hand to the host. ``check_bytes`` and ``step_bytes``: bytes of gradients that the check for inf and
    NaN, and the optimizer, read and write, by parameter; None where the check is a part of Inductor's kernels.
    ``memory_peak`` and ``memory_activations``: bytes, read as ``memory_how`` says.
    """

    parameters: int
    casts: int | None
    cast_bytes: int | None
    backward_casts: int | None
    host_syncs: int
    check_bytes: float | None
    step_bytes: float
    memory_peak: int
    memory_activations: int
    memory_how: str

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def observe(training: Training) -> Observed:
    """Run two more steps of ``training``, one counted and one with an eye on memory."""
    counted = CountedOps()
    with _kernels_counted(counted), _synchronisations(training.plan.device) as waits, counted:
        training.step()
    training.wait()
    memory = measure_memory(training)
    parameters = sum(parameter.numel() for parameter in training.module.parameters())
    casts = _casts(training, counted)
    eager = not training.contender.compiler
    hidden = training.scaler.is_enabled() and not counted.check_bytes
    return Observed(
        parameters=parameters,
        casts=None if casts is None else casts.count,
        cast_bytes=None if casts is None else casts.bytes,
        backward_casts=counted.backward.count if eager else None,
        host_syncs=len(waits) if training.plan.device == "cuda" else counted.host_reads,
        check_bytes=None if hidden else counted.check_bytes / parameters,
        step_bytes=counted.step_bytes / parameters,
        memory_peak=memory.peak,
        memory_activations=memory.activations,
        memory_how=memory.how,
    )


def _casts(training: Training, counted: CountedOps) -> Casts | None:
    if training.report is not None:
        return reported_casts(training.report)
    if not training.contender.compiler:
        return counted.forward
    return None if training.contender.autocast else Casts()


def reported_casts(report: Report) -> Casts:
    """The casts that ``fxamp.report`` lists, all graphs together."""
    found = [totals(graph) for graph in report.document.graphs]
    return Casts(sum(total.casts for total in found), sum(total.cast_bytes for total in found))


@contextmanager
def _synchronisations(device: str) -> Iterator[list[warnings.WarningMessage]]:
    """Collects a warning for each time that the host waits for the CUDA device inside."""
    waits: list[warnings.WarningMessage] = []
    if device != "cuda":
        yield waits
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits.extend(warning for warning in caught if _SYNC_WARNING in str(warning.message))


@contextmanager
def _kernels_counted(counted: CountedOps) -> Iterator[None]:
    """Adds to ``counted`` what fxamp's scaler has checked outside of graphs: no op of torch shows that work."""

    def wrapped(function: Any, in_place: bool) -> Any:
        def run(grads: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
            counted.check_bytes += _planned(grads, in_place)
            function(grads, *args, **kwargs)

        return run

    with (
        patch.object(kernels, "check_", wrapped(kernels.check_, in_place=False)),
        patch.object(kernels, "check_unscale_", wrapped(kernels.check_unscale_, in_place=True)),
    ):
        yield


def _planned(grads: Sequence[Tensor], in_place: bool) -> int:
    """The bytes that the kernels' plan moves for these gradients."""
    gradients = tuple(Gradient(g.numel(), g.dtype, g.dtype if in_place else None, True, True) for g in grads)
    return bytes_moved(make_plan(gradients, Asked(found_inf=True, flags=True), wave=32))
