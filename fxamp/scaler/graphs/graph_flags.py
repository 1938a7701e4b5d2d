"""What the compiled backwards reported about their gradients since the last update."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from fxamp.scaler.graphs.flag_table import FlagTable
from fxamp.torch_devices import moved

Owner = Tensor | weakref.ReferenceType[Tensor] | None
"""The parameter that a compiled graph's gradient belongs to; None if it belongs to no parameter."""


@dataclass(frozen=True)
class _Mark:
    """A gradient's identity when it was checked: its storage, its offset, and its version (number of writes).

    It does not keep the gradient alive, and autograd can still take the tensor over as ``.grad``. While the mark
    exists, no other storage can have the same address, even after the memory is freed.
    """

    storage: StorageWeakRef
    address: int
    version: int

    @staticmethod
    def of(gradient: Tensor) -> "_Mark":
        storage = StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]
        return _Mark(storage, gradient.data_ptr(), gradient._version)

    def fits(self, gradient: Tensor) -> bool:
        if type(gradient) is not Tensor or gradient.layout is not torch.strided:
            return False
        same = gradient.untyped_storage()._cdata == self.storage.cdata and gradient.data_ptr() == self.address
        return same and gradient._version == self.version


@dataclass(frozen=True, eq=False)
class _Square:
    """The sum of squares that one backward reported for the gradients of ``owners`` (ids of parameters)."""

    owners: frozenset[int]
    total: Tensor


class GraphFlags:
    """Sticky flags: an overflow in one backward is kept through later backwards, until :meth:`clear`.

    So one bad micro-batch skips the whole accumulated step. If a parameter's gradient is summed from several graphs,
    it is bad if any of them reported an overflow.

    A clean flag holds only for the gradient as the graph returned it. If the gradient changed since (summed with
    another one, all-reduced by DistributedDataParallel, changed by a hook), it must be checked again: :meth:`split`
    says which gradients are unchanged.

    A gradient that belongs to no parameter went on into an earlier graph or into eager code. Its flag counts for every
    optimizer: the overflow may be invisible later, for example after a hook that clamps.
    """

    def __init__(self) -> None:
        self._tables: dict[torch.device, FlagTable] = {}
        self._everybody = torch.empty(0)
        self._unowned = False
        self._marks: dict[int, _Mark] = {}
        self._squares: list[_Square] = []
        self.wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        """The DistributedDataParallel wrappers in which this scaler's graphs ran; never cleared."""

    def record(
        self, owners: Sequence[Owner], flags: Tensor, gradients: Sequence[Tensor], square: Tensor | None = None
    ) -> None:
        """Record one backward's flags, bool or int32 ``[len(owners)]``, and its gradients; waits for no device.

        ``square``: the sum of the squares of these gradients, 0-dim float32, if the backward computed it.
        """
        if flags.device not in self._tables:
            self._tables[flags.device] = FlagTable(flags.device)
        living = [owner() if isinstance(owner, weakref.ReferenceType) else owner for owner in owners]
        slots = [self._everybody if owner is None else alive for owner, alive in zip(owners, living, strict=True)]
        # Do not use ``in``: it would compare tensors to None with ``==``.
        self._unowned = self._unowned or any(owner is None for owner in owners)
        self._tables[flags.device].add(slots, flags)
        for owner, gradient in zip(living, gradients, strict=True):
            if owner is not None and gradient.layout is torch.strided:  # a sparse one is checked again
                self._marks[id(owner)] = _Mark.of(gradient)
        if square is not None and len({*map(id, living)}) == len(living):
            self._squares.append(_Square(frozenset(map(id, living)), square))

    def split(self, parameters: Iterable[Tensor]) -> tuple[dict[torch.device, list[Tensor]], list[Tensor]]:
        """Return the parameters whose gradient is exactly what a graph checked, by device, and all others."""
        covered: dict[torch.device, list[Tensor]] = {}
        others: list[Tensor] = []
        for parameter in parameters:
            mark, gradient = self._marks.get(id(parameter)), parameter.grad
            if mark is not None and gradient is not None and mark.fits(gradient):
                covered.setdefault(gradient.device, []).append(parameter)
            else:
                others.append(parameter)
        return covered, others

    def square(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor | None:
        """Return the sum of the squares of the parameters' gradients, 0-dim float32 on ``device``; None if unknown.

        It is known if every gradient is unchanged since a backward returned it, and those backwards returned no others.
        """
        wanted, others = {*map(id, parameters)}, self.split(parameters)[1]
        found = [each for each in self._squares if each.owners & wanted]
        left = sorted(owner for each in found for owner in each.owners)
        if others or not wanted or left != sorted(wanted):
            return None
        return torch.stack([moved(each.total, device) for each in found]).sum()

    def read(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the parameters' flags, 0 or 1: int32 ``[len(parameters)]`` on ``device``."""
        flags = torch.zeros(len(parameters), dtype=torch.int32, device=device)
        for table in self._tables.values():
            flags = torch.maximum(flags, moved(table.read(parameters), device))
        return flags.clamp(max=1)

    def read_unowned(self, device: torch.device) -> Tensor | None:
        """Return the flag that counts for every optimizer, int32 ``[1]`` on ``device``; None if there is none."""
        return self.read([self._everybody], device) if self._unowned else None

    def clear(self) -> None:
        """Drop all flags, and the record of which gradients were checked."""
        for table in self._tables.values():
            table.clear()
        self._marks.clear()
        self._squares.clear()
        self._unowned = False
