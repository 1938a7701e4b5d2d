"""Counts of one contender's steps other than time, taken in extra steps after the timed ones."""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from fxamp.backend.report import Report
from fxamp.listing.totals import totals
from fxamp.tools.bench.traffic import counted_traffic
from fxamp.tools.bench.train.counted_ops import Casts, CountedOps
from fxamp.tools.bench.train.memory import measure_memory
from fxamp.tools.bench.train.training import Training
from fxamp.tools.common.cuda_syncs import Count, cuda_syncs


@dataclass(frozen=True)
class Observed:
    """Counts of one step; None if they are not available.

    ``casts`` and ``cast_bytes``: of the forward. fxamp's are those that ``fxamp.report`` lists; eager autocast's are
    counted as they run; those of torch.compile with autocast are not visible. ``backward_casts``: those of eager code
    in the backward. ``host_syncs``: on cuda what torch.cuda.set_sync_debug_mode reports, elsewhere the values that ops
    copy to the host. ``update_bytes``: bytes per parameter that check, unscaling, clipping and the optimizer read and
    write: gradients, parameters and state. ``check_bytes``: the same for the check inside the backward, which widens
    16-bit gradients on the way; None if it is a part of Inductor's kernels. ``memory_peak`` and
    ``memory_activations``: bytes, from the source that ``memory_how`` names.
    """

    parameters: int
    casts: int | None
    cast_bytes: int | None
    backward_casts: int | None
    host_syncs: int
    update_bytes: float
    check_bytes: float | None
    memory_peak: int
    memory_activations: int
    memory_how: str

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def observe(training: Training) -> Observed:
    """Run two more steps of ``training``, one counted and one with an eye on memory."""
    counted = CountedOps()
    cuda = training.experiment.device == "cuda"
    with cuda_syncs() if cuda else nullcontext(Count()) as waits, counted:
        training.backward(training.forward())
        with counted_traffic() as traffic:
            training.update()
        training.clear()
    training.wait()
    memory = measure_memory(training)
    parameters = sum(parameter.numel() for parameter in training.module.parameters())
    casts = _casts(training, counted)
    eager = not training.contender.compiler
    hidden = training.report is not None and training.scaler.is_enabled() and not counted.check_bytes
    return Observed(
        parameters=parameters,
        casts=None if casts is None else casts.count,
        cast_bytes=None if casts is None else casts.bytes,
        backward_casts=counted.backward.count if eager else None,
        host_syncs=waits.value if cuda else counted.host_reads,
        update_bytes=(traffic.read + traffic.written) / parameters,
        check_bytes=None if hidden else counted.check_bytes / parameters,
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
