"""What one contender's steps do besides taking time, seen in extra steps after the timed ones."""

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from fxamp.graph_text.totals import totals
from fxamp.reports.report import Report
from fxamp.tools.bench.host_syncs import host_syncs
from fxamp.tools.bench.train.training import Training
from fxamp.tools.common.running_ops import RunningOps
from fxamp.tools.common.step_memory import StepMemory, lasting_bytes, step_memory
from fxamp.torch_dtypes import NARROW
from fxamp.torch_private import running_backward


@dataclass
class Casts:
    """Conversions to or from a 16-bit floating-point dtype: how many, and the bytes they read and write together."""

    count: int = 0
    bytes: int = 0


class ForwardCasts(RunningOps):  # type: ignore[no-untyped-call]
    """Counts the casts that run in a forward, in ``casts``; not those of Inductor's code, which calls no ops."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = Casts()

    def ran(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if op is not torch.ops.aten._to_copy.default or running_backward() != -1:
            return
        dtypes = {args[0].dtype, result.dtype}
        if len(dtypes) == 2 and dtypes & NARROW.keys() and all(dtype.is_floating_point for dtype in dtypes):
            self.casts.count += 1
            self.casts.bytes += args[0].nbytes + result.nbytes


def observe(training: Training) -> dict[str, Any]:
    """Run two more steps of ``training``: count casts and host syncs in one, memory in the other; return all by name.

    ``casts`` and ``cast_bytes``: of the forward. fxamp's are those that ``fxamp.report`` lists; eager autocast's are
    counted as they run; those of torch.compile with autocast are not visible: None, as without a forward.
    ``host_syncs``: on cuda what torch.cuda.set_sync_debug_mode reports, elsewhere the values that ops copy to the host.
    ``memory_peak``: bytes of all tensors at once; ``memory_step``: those that the step needs besides what lives from
    step to step; ``memory_kept``: those that the forward keeps for the backward; from the source that ``memory_how``
    names.
    """
    with host_syncs(training.experiment.device) as syncs, ForwardCasts() as running:
        training.step()
    training.wait()
    memory = measure_memory(training)
    casts = _casts(training, running.casts) if training.batches else None
    return {
        "parameters": sum(parameter.numel() for parameter in training.module.parameters()),
        "casts": None if casts is None else casts.count,
        "cast_bytes": None if casts is None else casts.bytes,
        "host_syncs": syncs.value,
        "memory_peak": memory.peak,
        "memory_step": memory.step,
        "memory_kept": memory.kept if training.batches else None,
        "memory_how": memory.how,
    }


def _casts(training: Training, running: Casts) -> Casts | None:
    if training.report is not None:
        return reported_casts(training.report)
    if not training.contender.compiler:
        return running
    return None if training.contender.autocast else Casts()


def reported_casts(report: Report) -> Casts:
    """The casts that ``fxamp.report`` lists, all graphs together."""
    graphs = [totals(graph) for graph in report.document.graphs]
    return Casts(sum(graph.casts for graph in graphs), sum(graph.cast_bytes for graph in graphs))


def measure_memory(training: Training) -> StepMemory:
    """Run one step and measure its memory."""

    def lasting() -> int:
        return lasting_bytes(training.module, training.optimizer, training.batches)

    return step_memory(training.experiment.device, training.forward, training.finish, lasting)
