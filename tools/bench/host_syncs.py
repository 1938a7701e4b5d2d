"""Counts what makes the host wait for the device."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxamp.tools.common.cuda_syncs import Count, cuda_syncs
from fxamp.tools.common.running_ops import RunningOps

_READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
)


class HostReads(RunningOps):  # type: ignore[no-untyped-call]
    """Counts values that the host reads from tensors, each of which waits for a GPU.

    Args:
        apart: tensors whose values do not count.
    """

    def __init__(self, apart: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.count = 0
        self._apart = list(apart)

    def ran(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if op in _READS:
            self.count += not any(args[0] is tensor for tensor in self._apart)


@contextmanager
def host_syncs(device: str, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Count]:
    """Count in a block: on cuda what torch.cuda.set_sync_debug_mode reports, on a CPU values that the host reads.

    On a CPU the 0-dim tensors of the optimizer's state are left out: torch keeps such counters on the host, wherever
    the parameters are.
    """
    if device == "cuda":
        with cuda_syncs() as count:
            yield count
        return
    entries = [] if optimizer is None else list(optimizer.state.values())
    state = [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]
    count = Count()
    with HostReads(value for value in state if value.dim() == 0) as reads:
        yield count
    count.value = reads.count
