"""The objects that every step reads: while they are unchanged, the last step's layout can be used again.

Objects are compared by identity and tensors by :func:`~fxamp.torch_private.comparison_with`, in C or C++, which takes
tens of nanoseconds per tensor. A Python loop takes ten times as long, more than a GPU needs for the step itself.
"""

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from fxamp.optim.packed_tensor import PackedTensor
from fxamp.optim.reading.fingerprint import PLAIN, fingerprint, own_attributes, setting_fingerprint
from fxamp.optim.reading.layout import gradients_of, optimized_parameters, setting_as_read
from fxamp.optim.shards import all_plain, is_stored, local
from fxamp.torch_private import comparison_with

_grad, _packed_parts = attrgetter("grad"), attrgetter("parts")


class Snapshot:
    """An optimizer at one moment. Two equal snapshots mean two layouts with equal :meth:`Layout.key`.

    Parameters and state are compared by identity and by what ``tensor.data = ...`` can change, their addresses among
    it; gradients by what a compiled step assumes of them, because most loops make new ones for each step.

    Attributes:
        gradients: one for each parameter, None if it has none; of DTensors this rank's part.
        active: those that are not None.
        settings: the values of each group's settings, "params" among them.

    The values of the settings ``counted`` are compared as floats' are.

    Raises:
        NotCompilableError: a gradient is a DTensor and its parameter is not, or the other way round.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, counted: frozenset[str] = frozenset()) -> None:
        groups = optimizer.param_groups
        owners = optimized_parameters(optimizer)
        self._state = _values_of(optimizer.state.values())
        self._objects: tuple[Sequence[Any], ...] = (owners, list(optimizer.state), self._state)
        self._parts, self.gradients = owners, list(map(_grad, owners))
        if not all_plain(owners):
            self._parts, self.gradients = list(map(local, owners)), gradients_of(owners)
            self._state = list(map(local, self._state))
            self._objects += (self._parts, self._state)
        self.active = [gradient for gradient in self.gradients if gradient is not None]
        everywhere = len(self.active) == len(owners)
        self._absent = [] if everywhere else [at for at, gradient in enumerate(self.gradients) if gradient is None]
        self._names = [(len(group["params"]), *group) for group in groups]
        self.settings = [list(group.values()) for group in groups]
        self._attributes = own_attributes(optimizer)
        self._counted = counted

    def _fingerprint(self) -> Any:
        settings = [
            [
                setting_fingerprint(setting_as_read(name, value, self._counted))
                for name, value in zip(names[1:], values, strict=True)
                if name != "params"
            ]
            for names, values in zip(self._names, self.settings, strict=True)
        ]
        return settings, fingerprint(self._attributes)

    def plain_settings(self) -> bool:
        """Whether the settings cannot change in place, and the optimizer has no attributes of its own."""
        return not self._attributes and all(
            isinstance(value, PLAIN) or (type(value) is tuple and all(isinstance(item, PLAIN) for item in value))
            for names, values in zip(self._names, self.settings, strict=True)
            for name, value in zip(names[1:], values, strict=True)
            if name != "params"
        )

    def comparison(self) -> "Callable[[Snapshot], Likeness]":
        """Return a function that compares a later snapshot with this one; it keeps no gradient alive.

        Parameters and gradients are dense.
        """
        objects, absent, names, count = self._objects, self._absent, self._names, len(self.active)
        settings = self.settings if self.plain_settings() else None
        print_ = self._fingerprint()
        same_parts, same_gradients = comparison_with(self._parts), comparison_with(self.active)
        same_state = _comparison_with_itself(self._state)
        # One that has moved may share memory with another one now. Those inside wrappers do not move.
        stored = [value for value in self._state if is_stored(value)]
        places = [*map(Tensor.data_ptr, self._parts), *map(Tensor.data_ptr, stored)]

        def likeness(now: "Snapshot") -> Likeness:
            if not (
                len(now._objects) == len(objects)
                and all(map(_same, now._objects, objects))
                and len(now.active) == count
                and now._absent == absent
                and now._names == names
                and same_parts(*now._parts)
                and same_gradients(*now.active)
                and same_state()
                and [*map(Tensor.data_ptr, now._parts), *map(Tensor.data_ptr, stored)] == places
            ):
                return Likeness.OTHER
            if settings is not None and not now._attributes and all(map(_same, now.settings, settings)):
                return Likeness.EQUAL
            return Likeness.KIND if now._fingerprint() == print_ else Likeness.OTHER

        return likeness


class Likeness(Enum):
    """How alike two snapshots are. ``EQUAL``: except addresses; ``KIND``: except the values of settings' floats."""

    EQUAL = "equal"
    KIND = "kind"
    OTHER = "other"


def _values_of(entries: Collection[Any]) -> list[Any]:
    try:
        return list(chain.from_iterable(map(dict.values, entries)))
    except TypeError:  # an entry that is not a dict
        return [value for entry in entries for value in (entry.values() if isinstance(entry, dict) else (entry,))]


def _comparison_with_itself(values: Sequence[Any]) -> Callable[[], bool]:
    """Return a function that tells whether the tensors among ``values``, and the parts of packed ones, are as now."""
    distinct = {id(v): v for v in values if isinstance(v, Tensor) and v.layout is torch.strided}
    tensors = [*distinct.values()]
    packed = [tensor for tensor in tensors if isinstance(tensor, PackedTensor)]
    same = comparison_with([*tensors, *chain.from_iterable(map(_packed_parts, packed))])
    if not packed:
        return partial(same, *tensors)
    return lambda: same(*tensors, *chain.from_iterable(map(_packed_parts, packed)))


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether the same objects are in both. Equality would compare the tensors' elements."""
    return len(one) == len(other) and all(map(is_, one, other))
