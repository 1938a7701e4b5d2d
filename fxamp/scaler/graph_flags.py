"""What the compiled backwards said about their gradients since the last update."""

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fxamp.scaler.flag_table import FlagTable

Owner = Tensor | weakref.ReferenceType[Tensor] | None
"""The parameter that a gradient of a compiled graph belongs to; None for a gradient of something else."""


class GraphFlags:
    """Sticky flags: an overflow in one backward is remembered through those that follow, until :meth:`clear`.

    So one bad micro-batch skips the whole accumulated step, and a parameter whose gradient is summed from several
    graphs is bad if any of them said so.
    """

    def __init__(self) -> None:
        self._tables: dict[torch.device, FlagTable] = {}

    def record(self, owners: Sequence[Owner], flags: Tensor) -> None:
        """Take one backward's flags: bool or int32 ``[len(owners)]``; waits for no device."""
        if flags.device not in self._tables:
            self._tables[flags.device] = FlagTable(flags.device)
        living = [owner() if isinstance(owner, weakref.ReferenceType) else owner for owner in owners]
        self._tables[flags.device].add(living, flags)

    def split(self, parameters: Iterable[Tensor]) -> tuple[dict[torch.device, list[Tensor]], list[Tensor]]:
        """Return the parameters that a graph reported on since the last clear, by device, and the others."""
        covered: dict[torch.device, list[Tensor]] = {}
        others: list[Tensor] = []
        for parameter in parameters:
            table = self._tables.get(parameter.device)
            if table is not None and parameter in table:
                covered.setdefault(parameter.device, []).append(parameter)
            else:
                others.append(parameter)
        return covered, others

    def read(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return flags of covered parameters of one device, 0 or 1: int32 ``[len(parameters)]``."""
        return self._tables[device].read(parameters).clamp(max=1)

    def clear(self) -> None:
        """Forget every flag, and which parameters were covered."""
        for table in self._tables.values():
            table.clear()
