"""What the compiled backwards said about their gradients since the last update."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from fxamp.scaler.flag_table import FlagTable

Owner = Tensor | weakref.ReferenceType[Tensor] | None
"""The parameter that a gradient of a compiled graph belongs to; None for a gradient of something else."""


@dataclass(frozen=True)
class _Mark:
    """A gradient as it was when it was checked: its memory, where it begins there, how often it had been written to.

    It holds no gradient alive, nor keeps autograd from taking it over as ``.grad``. While the mark lives no other
    storage can get the address of this one, even after its memory is freed.
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
    """The sum of the squares of the gradients of ``owners``, ids of parameters, as one backward left them."""

    owners: frozenset[int]
    total: Tensor


class GraphFlags:
    """Sticky flags: an overflow in one backward is remembered through those that follow, until :meth:`clear`.

    So one bad micro-batch skips the whole accumulated step, and a parameter whose gradient is summed from several
    graphs is bad if any of them said so.

    A clean flag vouches for the gradient as it was. What became of it since (a sum with another gradient, a bucket of
    DistributedDataParallel, the work of a hook) is for others to check: :meth:`split` tells which are as they were.

    The flag of a gradient that no parameter owns, which went on into an earlier graph or into eager code, counts for
    every optimizer: what it spoilt there may not show, where a hook clamped it, say.
    """

    def __init__(self) -> None:
        self._tables: dict[torch.device, FlagTable] = {}
        self._everybody = torch.empty(0)
        self._unowned = False
        self._marks: dict[int, _Mark] = {}
        self._squares: list[_Square] = []
        self.wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        """Those in which graphs of this scaler have run; never forgotten."""

    def record(
        self, owners: Sequence[Owner], flags: Tensor, gradients: Sequence[Tensor], square: Tensor | None = None
    ) -> None:
        """Take one backward's flags, bool or int32 ``[len(owners)]``, and the gradients; waits for no device.

        ``square``: the sum of the squares of these gradients, 0-dim float32, if the backward made it.
        """
        if flags.device not in self._tables:
            self._tables[flags.device] = FlagTable(flags.device)
        living = [owner() if isinstance(owner, weakref.ReferenceType) else owner for owner in owners]
        slots = [self._everybody if owner is None else alive for owner, alive in zip(owners, living, strict=True)]
        # Not by ``in``, which asks tensors whether they equal None.
        self._unowned = self._unowned or any(owner is None for owner in owners)
        self._tables[flags.device].add(slots, flags)
        for owner, gradient in zip(living, gradients, strict=True):
            if owner is not None:
                self._marks[id(owner)] = _Mark.of(gradient)
        if square is not None and len({*map(id, living)}) == len(living):
            self._squares.append(_Square(frozenset(map(id, living)), square))

    def split(self, parameters: Iterable[Tensor]) -> tuple[dict[torch.device, list[Tensor]], list[Tensor]]:
        """Return the parameters whose gradient is just what a graph checked, by device, and the others."""
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

        It is known where each gradient is just what a backward left, and those backwards left no others.
        """
        wanted, others = {*map(id, parameters)}, self.split(parameters)[1]
        found = [each for each in self._squares if each.owners & wanted]
        left = sorted(owner for each in found for owner in each.owners)
        if others or not wanted or left != sorted(wanted):
            return None
        return torch.stack([each.total.to(device, non_blocking=device.type != "cpu") for each in found]).sum()

    def read(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the parameters' flags, 0 or 1: int32 ``[len(parameters)]`` on ``device``."""
        flags = torch.zeros(len(parameters), dtype=torch.int32, device=device)
        for table in self._tables.values():
            flags = torch.maximum(flags, table.read(parameters).to(device, non_blocking=device.type != "cpu"))
        return flags.clamp(max=1)

    def read_unowned(self, device: torch.device) -> Tensor | None:
        """Return the flag that counts for every optimizer, int32 ``[1]`` on ``device``; None if nothing raised it."""
        return self.read([self._everybody], device) if self._unowned else None

    def clear(self) -> None:
        """Forget every flag, and which gradients were checked."""
        for table in self._tables.values():
            table.clear()
        self._marks.clear()
        self._squares.clear()
        self._unowned = False
