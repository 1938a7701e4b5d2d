"""The flags of one scaler's compiled graphs: what their backwards reported since the last update."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from fxamp.errors import OptionError
from fxamp.scaler.graphs.flag_table import FlagTable
from fxamp.scaler.graphs.wrappers import require_unscaled_sums
from fxamp.scaler.scale import Owner
from fxamp.torch_devices import moved
from fxamp.torch_private import compile_options, running_wrapper


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


@dataclass(frozen=True, eq=False)
class Report:
    """What graphs say of some of the gradients that a check has to do with.

    ``places``: which ones, by position. ``flags``: whether a graph saw an overflow in each, int32 0 or 1; None if there
    are no graphs. ``unchanged``: whether each is exactly what a graph checked, so that its flag decides.
    """

    places: list[int]
    flags: Tensor | None
    unchanged: bool


class GraphFlags:
    """The flags of one scaler's compiled graphs, and whether it is attached to any.

    Detached, the scaler multiplies losses itself. Attached, compiled backwards scale, unscale, check, and report here.

    Flags are sticky: an overflow in one backward is kept through later backwards, until :meth:`clear`. So one bad
    micro-batch skips the whole accumulated step. If a parameter's gradient is summed from several graphs, it is bad if
    any of them reported an overflow.

    A clean flag holds only for the gradient as the graph returned it. If the gradient changed since (summed with
    another one, all-reduced by DistributedDataParallel, changed by a hook), it must be checked again.

    A gradient that belongs to no parameter went on into an earlier graph or into eager code. Its flag counts for every
    optimizer: the overflow may be invisible later, for example after a hook that clamps.

    Attributes:
        attached: whether compiled backwards scale, unscale and check.
        scaled_losses: whether the scaler has multiplied a loss itself since the last update.
    """

    def __init__(self, scaled_losses: bool = False) -> None:
        self.attached = False
        self.scaled_losses = scaled_losses
        self._tables: dict[torch.device, FlagTable] = {}
        self._everybody = torch.empty(0)
        self._unowned = False
        self._marks: dict[int, _Mark] = {}
        self._squares: list[_Square] = []
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    # ---- attached or not ----

    def attach(self) -> None:
        """Attach the scaler; later calls do nothing.

        Raises:
            OptionError: the scaler has multiplied a loss itself since the last update.
        """
        if self.scaled_losses and not self.attached:
            raise OptionError(
                "the scaler was given to the backend after it had scaled a loss itself; it would no longer unscale "
                "that loss's gradients. Call update() first, or call attach() right after creating the scaler"
            )
        self.attached = True

    def in_use(self, scaler: object) -> bool:
        """Whether ``scaler``, the owner, is attached; attach it if torch.compile has it, even if nothing is compiled.

        Dynamo may compile nothing of a model. Its gradients are true then, like those of a model that it compiles.
        """
        if not self.attached and not self.scaled_losses:
            self.attached = any(options.get("scaler") is scaler for options in compile_options())
        return self.attached

    def note_forward(self) -> None:
        """Remember the DistributedDataParallel whose forward is running, if any: a compiled graph runs inside it."""
        wrapper = running_wrapper()
        if wrapper is not None and self.attached:
            self._wrappers.add(wrapper)

    def require_wrappers(self) -> None:
        """Raise UnscaledError if a DistributedDataParallel around a graph sums in float16, or is inside ``join()``."""
        require_unscaled_sums(self._wrappers)

    # ---- what backwards report ----

    @torch.no_grad()
    def record(
        self, owners: Sequence[Owner], flags: Tensor, gradients: Sequence[Tensor], square: Tensor | None = None
    ) -> None:
        """Record what one compiled backward found; waits for no device.

        Args:
            owners: for each flag the parameter whose gradient it is, a weak reference to it, or None for a gradient
                that no parameter owns; such a flag counts for every optimizer.
            flags: bool or int32 ``[len(owners)]``; nonzero for a gradient that holds an inf or NaN.
            gradients: the unscaled gradients, as they are returned to autograd. They are not kept alive. A parameter
                whose ``.grad`` at the step is another tensor, or was written to, is checked again.
            square: the sum of the squares of all these gradients, 0-dim float32; None if unknown.

        Raises:
            OptionError: the scaler is not attached to a backend, or the lengths differ.
        """
        if not self.attached:
            raise OptionError("flags of a graph: call attach() first, so that scale() leaves losses to the graph")
        if flags.shape != (len(owners),) or len(gradients) != len(owners):
            raise OptionError(
                f"flags of a graph: {len(owners)} parameters, {len(gradients)} gradients, flags of shape "
                f"{tuple(flags.shape)}"
            )
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

    # ---- what a check reads ----

    def reports(self, parameters: Sequence[Tensor], device: torch.device, trusted: bool) -> list[Report]:
        """Return reports on all of the parameters' gradients, with flags on ``device``; of unchanged ones first.

        ``trusted``: False says of no gradient that it is unchanged, so that all are read.
        """
        every = [*range(len(parameters))]
        if not self.attached:
            return [Report(every, None, False)] if every else []
        unchanged, others = self._split(parameters) if trusted else ([], every)
        return [
            Report(places, self._read([parameters[at] for at in places], device), same)
            for places, same in ((unchanged, True), (others, False))
            if places
        ]

    def unowned(self, device: torch.device) -> Tensor | None:
        """Return the flag that counts for every optimizer, int32 ``[]`` on ``device``; None if there is none."""
        return self._read([self._everybody], device).squeeze() if self._unowned else None

    def square(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor | None:
        """Return the sum of the squares of the parameters' gradients, 0-dim float32 on ``device``; None if unknown.

        It is known if every gradient is unchanged since a backward returned it, and those backwards returned no others.
        """
        if not self._squares:
            return None
        summands, (_, changed) = {*map(id, parameters)}, self._split(parameters)
        squares = [square for square in self._squares if square.owners & summands]
        summed = sorted(owner for square in squares for owner in square.owners)
        if changed or not summands or summed != sorted(summands):
            return None
        return torch.stack([moved(square.total, device) for square in squares]).sum()

    def clear(self) -> None:
        """Drop all flags, and the record of which gradients were checked; the scaler stays attached."""
        for table in self._tables.values():
            table.clear()
        self._marks.clear()
        self._squares.clear()
        self._unowned = False
        self.scaled_losses = False

    def _split(self, parameters: Sequence[Tensor]) -> tuple[list[int], list[int]]:
        """Return the places of the parameters whose gradient is exactly what a graph checked, and of all others."""
        unchanged: list[int] = []
        others: list[int] = []
        if not self._marks:
            return unchanged, [*range(len(parameters))]
        for at, parameter in enumerate(parameters):
            mark, gradient = self._marks.get(id(parameter)), parameter.grad
            (unchanged if mark is not None and gradient is not None and mark.fits(gradient) else others).append(at)
        return unchanged, others

    def _read(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the parameters' flags, 0 or 1: int32 ``[len(parameters)]`` on ``device``."""
        flags = torch.zeros(len(parameters), dtype=torch.int32, device=device)
        for table in self._tables.values():
            flags = torch.maximum(flags, moved(table.read(parameters), device))
        return flags.clamp(max=1)
