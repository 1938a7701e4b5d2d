"""What makes a gradient the one that it was: backwards note it, and clipping, checks and steps ask."""

from collections.abc import Sequence
from operator import attrgetter
from weakref import ref

import torch
from torch import Tensor

_layout, _version = map(attrgetter, ("layout", "_version"))


class Identity:
    """Gradients at one moment: the storage, address and version (number of writes) of each.

    It keeps none of them alive, and autograd can still take each over as ``.grad``. A storage is identified by its
    Python object, which lives as long as the storage: memory that is freed and used again is another one. If one of
    the gradients is sparse, none is identified.
    """

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._dense = {torch.strided}.issuperset(map(_layout, gradients))
        if self._dense:
            self._storages = list(map(ref, map(Tensor.untyped_storage, gradients)))
            self._addresses = list(map(Tensor.data_ptr, gradients))
            self._versions = list(map(_version, gradients))

    def unchanged(self, places: Sequence[int | None], gradients: Sequence[Tensor | None]) -> list[int]:
        """Return those of ``places``, one for each position here, whose gradient is what stood at the position.

        ``gradients``: by place, each a dense tensor of class Tensor, or None.
        """
        if not self._dense:
            return []
        return [
            place
            for place, storage, address, version in zip(
                places, self._storages, self._addresses, self._versions, strict=True
            )
            if place is not None
            and (gradient := gradients[place]) is not None
            and storage() is gradient.untyped_storage()
            and address == gradient.data_ptr()
            and version == gradient._version
        ]
