"""Counting what makes the host wait for the device."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_SYNC_WARNING = "synchronizing CUDA operation"


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


class Count:
    """``value`` is there after the block."""

    value = 0


@contextmanager
def host_syncs(device: str, optimizer: torch.optim.Optimizer) -> Iterator[Count]:
    """Count in a block: on cuda what torch.cuda.set_sync_debug_mode reports, on a CPU values that the host reads.

    On a CPU the 0-dim tensors of the optimizer's state are left out: torch keeps such counters on the host, wherever
    the parameters are.
    """
    count = Count()
    if device != "cuda":
        kept = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
        with HostReads(value for value in kept if value.dim() == 0) as reads:
            yield count
        count.value = reads.count
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield count
        finally:
            torch.cuda.set_sync_debug_mode("default")
    count.value = sum(_SYNC_WARNING in str(warning.message) for warning in caught)
