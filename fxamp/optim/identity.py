"""Recognize gradients that are as a backward returned them, so that clipping and checks need not read them."""

from collections.abc import Sequence
from itertools import count
from operator import attrgetter

import torch
from torch import Tensor

from fxamp.torch_dtypes import HALVES
from fxamp.torch_private import set_version

_version = attrgetter("_version")

#: The first version number that fxamp gives to gradients. No tensor reaches it by writes in place.
_FIRST = 2**20
_versions = count(_FIRST)


def next_version() -> int:
    """Return a version number newer than that of every gradient which a backward has returned."""
    return next(_versions)


class Identities:
    """The gradients that backwards returned: the address of each, and the version number of its backward.

    The version is autograd's count of writes, set to a number that no other tensor has, not even one that reuses freed
    memory. This object keeps no gradient alive, and autograd can still use each as ``.grad``, which shares its version.
    """

    def __init__(self) -> None:
        self._noted: dict[object, int] = {}

    def note(
        self, gradients: Sequence[Tensor], owners: Sequence[Tensor | None] | None = None, dense: bool = False
    ) -> int:
        """Note the gradients that a backward returns, if :func:`has_identity` holds; return their version.

        ``owners``: each gradient is noted for this parameter alone; None: for any parameter. ``dense``: whether the
        caller knows that :func:`has_identity` holds for all of them.
        """
        if not dense:
            fit = [at for at, gradient in enumerate(gradients) if has_identity(gradient)]
            gradients = [gradients[at] for at in fit]
            owners = None if owners is None else [owners[at] for at in fit]
        version = next_version()
        set_version(gradients, version)
        addresses = map(Tensor.data_ptr, gradients)
        keys = addresses if owners is None else zip(addresses, map(id, owners), strict=True)
        self._noted.update(dict.fromkeys(keys, version))
        return version

    def changed(self, gradients: Sequence[Tensor | None], owners: Sequence[Tensor]) -> list[int]:
        """Return the positions of the ``gradients`` of ``owners`` that are not exactly as a backward returned them."""
        if self._are_noted(gradients, owners):  # many times as fast as one by one
            return []
        pairs = zip(gradients, owners, strict=True)
        return [at for at, (gradient, owner) in enumerate(pairs) if not self._is_noted(gradient, owner)]

    def _is_noted(self, gradient: Tensor | None, owner: Tensor) -> bool:
        if type(gradient) is not Tensor or gradient._version < _FIRST:
            return False
        address, version = gradient.data_ptr(), gradient._version
        return version in (self._noted.get(address), self._noted.get((address, id(owner))))

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
        """Forget all gradients."""
        self._noted.clear()


def has_identity(gradient: Tensor) -> bool:
    """Whether ``gradient``, which a backward returned, can be noted: it is dense, and the backward made it.

    A float16 gradient may be a tensor of the program; all others are results of unscaling.
    """
    return gradient.layout is torch.strided and gradient.dtype not in HALVES
