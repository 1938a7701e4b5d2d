"""What every step reads of its optimizer: the last step's layout serves while all of it is as it was.

Objects are compared by identity and tensors by :func:`~fxamp.torch_private.comparison_with`, in C or C++: in tens of
nanoseconds a tensor. A loop in Python takes ten times as long, which is more than a GPU needs for the step itself.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from fxamp.optim.reading.fingerprint import fingerprint, own_attributes, setting_fingerprint
from fxamp.optim.reading.layout import gradients_of
from fxamp.optim.shards import all_plain, local
from fxamp.torch_private import comparison_with

_grad = attrgetter("grad")


class Snapshot:
    """An optimizer at one moment. Two equal snapshots mean two layouts with equal :meth:`Layout.key`.

    Parameters and state are compared by identity, parameters also by what ``parameter.data = ...`` can change;
    gradients by what a compiled step assumes of them, because most loops make new ones for each step.

    Attributes:
        gradients: one for each parameter, None if it has none; of DTensors this rank's part.

    Raises:
        NotCompilableError: a gradient is a DTensor and its parameter is not, or the other way round.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        owners = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        entries = optimizer.state.values()
        if not {dict}.issuperset(map(type, entries)):
            entries = [entry if isinstance(entry, dict) else {"": entry} for entry in entries]  # type: ignore[assignment]
        state = list(chain.from_iterable(map(dict.values, entries)))
        self._objects: tuple[Sequence[Any], ...] = (owners, list(optimizer.state), state)
        self._parts, self.gradients = owners, list(map(_grad, owners))
        if not all_plain(owners):
            self._parts, self.gradients = list(map(local, owners)), gradients_of(owners)
            self._objects += (self._parts, list(map(local, state)))
        self._active = [gradient for gradient in self.gradients if gradient is not None]
        everywhere = len(self._active) == len(owners)
        self._absent = [] if everywhere else [at for at, gradient in enumerate(self.gradients) if gradient is None]
        self._settings = (
            [
                [(k, setting_fingerprint(v)) for k, v in group.items() if k != "params"]
                for group in optimizer.param_groups
            ],
            fingerprint(own_attributes(optimizer)),
        )

    def comparison(self) -> "Callable[[Snapshot], bool]":
        """Return whether a later snapshot is equal to this one; holds no gradient, which the user may drop.

        Parameters and gradients are dense.
        """
        objects, absent, settings, count = self._objects, self._absent, self._settings, len(self._active)
        same_parts, same_gradients = comparison_with(self._parts), comparison_with(self._active)

        def equal(now: "Snapshot") -> bool:
            return (
                len(now._objects) == len(objects)
                and all(map(_same, now._objects, objects))
                and len(now._active) == count
                and now._absent == absent
                and now._settings == settings
                and same_parts(*now._parts)
                and same_gradients(*now._active)
            )

        return equal


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether the same objects are in both. Equality would compare the tensors' elements."""
    return len(one) == len(other) and all(map(is_, one, other))
