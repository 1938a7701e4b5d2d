"""Counters of overflow flags, one per parameter, kept and incremented on the parameters' device without waiting."""

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fxamp.torch_devices import moved

NOBODY = 0
"""The slot for flags of gradients that belong to no living parameter; never read."""

MAX_INDICES = 64
"""Maximum number of cached index tensors; if more sets of gradients occur than this, they are not worth caching."""


class FlagTable:
    """One int32 counter per parameter on one device. Parameters are identified by id and not kept alive."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts = torch.zeros(1, dtype=torch.int32, device=device)
        self._next_slot = NOBODY + 1
        self._slots: dict[int, int] = {}
        self._owners: dict[int, weakref.ref[Tensor]] = {}
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def add(self, parameters: Sequence[Tensor | None], flags: Tensor) -> None:
        """Add ``flags``, bool or int32 ``[len(parameters)]`` on the table's device, to the parameters' counters."""
        counts = flags.detach().to(torch.int32)
        if len(parameters) == 1:
            # Each single gradient would need its own index tensor.
            (slot,) = self._slots_of(parameters)
            self._counts[slot : slot + 1].add_(counts)
            return
        index = self._index(parameters)
        self._counts.index_add_(0, index, counts)

    def read(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the parameters' counters: int32 ``[len(parameters)]`` on the table's device."""
        # Build the index first: it makes room for new parameters.
        index = self._index(parameters)
        return self._counts.index_select(0, index)

    def clear(self) -> None:
        """Set every counter to zero."""
        self._counts.zero_()

    def nonzero(self) -> Iterator[tuple[Tensor, int]]:
        """Yield each living parameter with a nonzero counter, and the counter; waits for the device."""
        counts = self._counts.tolist()
        for key, slot in list(self._slots.items()):
            parameter = self._owners[key]()
            if parameter is not None and counts[slot]:
                yield parameter, counts[slot]

    def _index(self, parameters: Sequence[Tensor | None]) -> Tensor:
        """The parameters' slots as an int64 tensor on the device; uploaded once per sequence of parameters."""
        key = tuple(map(id, parameters))
        index = self._indices.get(key)
        if index is not None:
            return index
        slots = self._slots_of(parameters)
        if len(self._indices) >= MAX_INDICES:
            self._indices.clear()
        index = torch.tensor(slots, dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda")
        self._indices[key] = moved(index, self._device)
        return self._indices[key]

    def _slots_of(self, parameters: Sequence[Tensor | None]) -> list[int]:
        """Return the parameters' slots; makes room for new parameters."""
        slots = [NOBODY if parameter is None else self._slot(parameter) for parameter in parameters]
        missing = self._next_slot - len(self._counts)
        if missing > 0:
            self._counts = torch.cat([self._counts, self._counts.new_zeros(missing)])
        return slots

    def _slot(self, parameter: Tensor) -> int:
        key = id(parameter)
        if key not in self._slots:
            self._slots[key] = self._next_slot
            self._next_slot += 1
            self._owners[key] = weakref.ref(parameter, lambda _: self._forget(key))
        return self._slots[key]

    def _forget(self, key: int) -> None:
        """Remove a dead parameter before another tensor can reuse its id; its slot is not reused."""
        del self._slots[key], self._owners[key]
        self._indices.clear()
