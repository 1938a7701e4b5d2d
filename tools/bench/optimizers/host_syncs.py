"""Counts what makes the host wait for the device."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.tools.common.cuda_syncs import Count, cuda_syncs


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts values that the host reads from tensors, each of which waits for a GPU.

    Args:
        apart: tensors whose values do not count.
    """

    def __init__(self, apart: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._apart = list(apart)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            self.count += not any(args[0] is each for each in self._apart)
        return func(*args, **(kwargs or {}))


@contextmanager
def host_syncs(device: str, optimizer: torch.optim.Optimizer) -> Iterator[Count]:
    """Count in a block: on cuda what torch.cuda.set_sync_debug_mode reports, on a CPU values that the host reads.

    On a CPU the 0-dim tensors of the optimizer's state are left out: torch keeps such counters on the host, wherever
    the parameters are.
    """
    if device == "cuda":
        with cuda_syncs() as count:
            yield count
        return
    kept = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    count = Count()
    with HostReads(value for value in kept if value.dim() == 0) as reads:
        yield count
    count.value = reads.count
