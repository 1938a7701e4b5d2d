"""What makes a gradient the one that it was: backwards note it, and clipping, checks and steps ask."""

from collections.abc import Sequence
from itertools import count
from operator import attrgetter

import torch
from torch import Tensor

from fxamp.torch_dtypes import HALVES
from fxamp.torch_private import set_version

_version = attrgetter("_version")

#: Version numbers that identities give to gradients: so many writes in place happen to no tensor.
_FIRST = 2**20
_versions = count(_FIRST)


class Identities:
    """Gradients as backwards returned them: the address of each, and a version number (of writes) of that backward.

    No other tensors have this version, not even in memory that is freed and used again. It keeps no gradient alive, and
    autograd can still take each over as ``.grad``, which shares its version.
    """

    def __init__(self) -> None:
        self._noted: dict[object, int] = {}

    def note(
        self, gradients: Sequence[Tensor], owners: Sequence[Tensor | None] | None = None, dense: bool = False
    ) -> int:
        """Note what a backward returns, of which that :func:`has_identity`; returns the version that it gets.

        ``owners``: each is noted as the gradient of this parameter alone; None: as that of any. ``dense``: whether the
        caller knows that all have an identity.
        """
        if not dense:
            fit = [at for at, gradient in enumerate(gradients) if has_identity(gradient)]
            gradients = [gradients[at] for at in fit]
            owners = None if owners is None else [owners[at] for at in fit]
        version = next(_versions)
        set_version(gradients, version)
        addresses = map(Tensor.data_ptr, gradients)
        keys = addresses if owners is None else zip(addresses, map(id, owners), strict=True)
        self._noted.update(dict.fromkeys(keys, version))
        return version

    def changed(self, gradients: Sequence[Tensor | None], owners: Sequence[Tensor]) -> list[int]:
        """Return the places of those ``gradients`` of ``owners`` that are not exactly what a backward returned."""
        if self._are_noted(gradients, owners):  # many times as fast
            return []
        return [
            at
            for at, (gradient, owner) in enumerate(zip(gradients, owners, strict=True))
            if not self._are_noted([gradient], [owner])
        ]

    def _are_noted(self, gradients: Sequence[Tensor | None], owners: Sequence[Tensor]) -> bool:
        if not {Tensor}.issuperset(map(type, gradients)):
            return False
        versions = list(map(_version, gradients))
        if min(versions, default=_FIRST) < _FIRST:
            return False
        addresses = list(map(Tensor.data_ptr, gradients))  # type: ignore[arg-type]  # none is None
        if versions == list(map(self._noted.get, addresses)):
            return True
        return versions == list(map(self._noted.get, zip(addresses, map(id, owners), strict=True)))

    def clear(self) -> None:
        """Forget all."""
        self._noted.clear()


def has_identity(gradient: Tensor) -> bool:
    """Whether a backward's ``gradient`` can be noted: if it is dense, and was made by the backward.

    One in float16 may be a tensor of the program's own; others are made by unscaling.
    """
    return gradient.layout is torch.strided and gradient.dtype not in HALVES
