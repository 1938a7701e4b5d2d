"""What every step reads of its optimizer, column by column: the last step's layout serves while the columns are equal.

A column holds one property of all tensors. It is read and compared in C, in tens of nanoseconds a tensor; a loop in
Python takes ten times as long, which is more than a GPU needs for the step itself.
"""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from fxamp.optim.borrow import own_attributes
from fxamp.optim.fingerprint import fingerprint
from fxamp.optim.layout import gradients_of, setting_look
from fxamp.optim.shards import all_plain, local

_grad, _dtype, _shape, _device = map(attrgetter, ("grad", "dtype", "shape", "device"))


class Snapshot:
    """An optimizer at one moment. Two equal snapshots mean two layouts with equal :meth:`Layout.key`.

    Parameters and state are compared by identity, parameters also by what ``parameter.data = ...`` can change;
    gradients by what a compiled step assumes of them, because most loops make new ones for each step.

    Attributes:
        gradients: one for each parameter, None if it has none; of DTensors this rank's part.

    Raises:
        RefusedError: a gradient is a DTensor and its parameter is not, or the other way round.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        owners = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        entries = optimizer.state.values()
        if not {dict}.issuperset(map(type, entries)):
            entries = [entry if isinstance(entry, dict) else {"": entry} for entry in entries]  # type: ignore[assignment]
        state = list(chain.from_iterable(map(dict.values, entries)))
        self._objects: tuple[Sequence[Any], ...] = (owners, list(optimizer.state), state)
        parts, self.gradients = owners, list(map(_grad, owners))
        if not all_plain(owners):
            parts, self.gradients = list(map(local, owners)), gradients_of(owners)
            self._objects += (parts, list(map(local, state)))
        gradients = [gradient for gradient in self.gradients if gradient is not None]
        self._columns = (
            list(map(_dtype, parts)),
            list(map(_shape, parts)),
            list(map(_device, parts)),
            [gradient is None for gradient in self.gradients],
            list(map(type, gradients)),
            list(map(_dtype, gradients)),
            _strides(gradients),
            [[(k, setting_look(v)) for k, v in group.items() if k != "params"] for group in optimizer.param_groups],
            fingerprint(own_attributes(optimizer)),
        )

    def release(self) -> "Snapshot":
        """Drop the gradients, which would stay alive after the user has dropped them; return the same object."""
        self.gradients = []
        return self

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Snapshot)
            and self._columns == other._columns
            and len(self._objects) == len(other._objects)
            and all(map(_same, self._objects, other._objects))
        )

    __hash__ = None  # type: ignore[assignment]


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether the same objects are in both. Equality would compare the tensors' elements."""
    return len(one) == len(other) and all(map(is_, one, other))


def _strides(gradients: Sequence[Tensor]) -> list[tuple[int, ...] | torch.layout]:
    try:
        return list(map(Tensor.stride, gradients))
    except RuntimeError:  # a sparse one has none
        return [each.stride() if each.layout is torch.strided else each.layout for each in gradients]
