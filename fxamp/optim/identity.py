"""What makes a gradient the one that it was: backwards note it, and clipping, checks and steps ask."""

from collections.abc import Sequence
from itertools import count
from operator import attrgetter

import torch
from torch import Tensor

from fxamp.torch_dtypes import HALVES
from fxamp.torch_private import set_version

_layout, _dtype, _version = map(attrgetter, ("layout", "dtype", "_version"))

#: Version numbers that identities give to gradients; so many writes in place happen to no tensor.
_versions = count(2**20)


class Identity:
    """Gradients at one moment: the address of each, and a version number (of writes) that only they have.

    Memory that is freed and used again has another version. It keeps no gradient alive, and autograd can still take
    each over as ``.grad``, which shares its version. If one of the gradients is sparse, none is identified. Neither is
    one in float16, which may be a tensor of the program's own: others are made by unscaling.
    """

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._addresses: list[int] = []
        self._version = next(_versions)
        if {torch.strided}.issuperset(map(_layout, gradients)):
            own = gradients
            if not HALVES.isdisjoint(map(_dtype, gradients)):
                own = [gradient for gradient in gradients if gradient.dtype not in HALVES]
            set_version(own, self._version)
            self._addresses = list(map(Tensor.data_ptr, gradients))

    def unchanged(self, places: Sequence[int | None], gradients: Sequence[Tensor | None]) -> list[int]:
        """Return those of ``places``, one for each position here, whose gradient is what stood at the position.

        ``gradients``: by place, each a dense tensor of class Tensor, or None.
        """
        whole = [place for place in places if place is not None]
        if len(whole) == len(places) and self._are([gradients[at] for at in whole]):  # several times as fast
            return whole
        return [
            place
            for place, address in zip(places, self._addresses, strict=False)
            if place is not None
            and (gradient := gradients[place]) is not None
            and gradient._version == self._version
            and gradient.data_ptr() == address
        ]

    def _are(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether ``gradients``, by position, are all that stood here."""
        if not {Tensor}.issuperset(map(type, gradients)) or not {self._version}.issuperset(map(_version, gradients)):
            return False
        return self._addresses == list(map(Tensor.data_ptr, gradients))  # type: ignore[arg-type]  # none is None
