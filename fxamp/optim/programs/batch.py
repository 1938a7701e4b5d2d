"""Step small parameters on a CPU together, as one flat tensor, in one call of the program instead of one for each.

A call of a compiled program costs the host more than the arithmetic of some thousand elements. The step is elementwise,
so it can run on a flat copy of several parameters, and its results are copied back. One C++ function copies all of
them, because a torch call for each would cost as much as the calls of the program.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxamp.optim.packed_tensor import PackedTensor
from fxamp.torch_devices import known
from fxamp.torch_private import compiled_function

#: The largest number of elements of a parameter that is copied: copying more costs more than a call of the program.
MOST_ELEMENTS = 2**12

#: The smallest number of parameters in a batch.
FEWEST = 4

Columns = Sequence[Sequence[Tensor]]

_COPY = r"""
#include <cstdint>
#include <cstring>

extern "C" void kernel(const int64_t* addresses, const int64_t* bytes, char* flat, const int64_t count,
                       const int64_t back)
{
    for (int64_t at = 0; at < count; ++at) {
        void* own = reinterpret_cast<void*>(addresses[at]);
        if (back) {
            std::memcpy(own, flat, bytes[at]);
        } else {
            std::memcpy(flat, own, bytes[at]);
        }
        flat += bytes[at];
    }
}
"""


@dataclass(frozen=True)
class _Column:
    """One input of the program for the parameters of a batch; ``scalar``: 0-dim tensors, which must all be equal.

    ``written``: whether the program writes to it. ``size``: the number of elements. ``bytes``: of each tensor, int64.
    """

    dtype: torch.dtype
    scalar: bool
    written: bool
    size: int
    bytes: Tensor


@dataclass(frozen=True)
class Batch:
    """Parameters of one kind that are stepped together.

    ``kind``: the index of their kind. ``members``: their positions in the columns.
    """

    kind: int
    members: tuple[int, ...]
    columns: tuple[_Column, ...]

    def step(self, compiled: Callable[..., Any], columns: Columns, others: Sequence[Any]) -> bool:
        """Step, unless a 0-dim tensor differs between the parameters; return whether it did.

        ``others``: the numbers, factors and flag that ``compiled`` takes after a parameter's tensors.
        """
        copy, own, inputs = _copy(), itemgetter(*self.members), []
        addresses = [np.fromiter(map(Tensor.data_ptr, own(column)), np.int64) for column in columns]
        tables = list(map(torch.from_numpy, addresses))
        for column, table in zip(self.columns, tables, strict=True):
            flat = torch.empty(column.size, dtype=column.dtype, device="cpu")
            copy(table, column.bytes, flat, len(self.members), 0)
            if column.scalar and not known(flat.eq(flat[0]).all()):
                return False
            inputs.append(flat[0] if column.scalar else flat)
        results = [at for at, column in enumerate(self.columns) if column.written]
        written = [inputs[at] for at in results]
        compiled(*inputs, *others)
        for at, flat in zip(results, written, strict=True):
            column = self.columns[at]
            own_values = flat.expand(column.size).contiguous() if column.scalar else flat
            copy(tables[at], column.bytes, own_values, len(self.members), 1)
        return True


def batches(kinds: Sequence[int], columns: Columns, written: Sequence[bool]) -> Iterator[Batch]:
    """Yield the batches of the parameters in ``columns``, whose kinds are ``kinds``.

    ``written``: for each column, whether the program writes to it.
    """
    scalars = [all(value.dim() == 0 for value in column) for column in columns]
    for kind in dict.fromkeys(kinds):
        members = tuple(
            at
            for at, row in enumerate(zip(*columns, strict=True))
            if kinds[at] == kind and all(scalar or _is_small(value) for value, scalar in zip(row, scalars, strict=True))
        )
        own = [[column[at] for at in members] for column in columns]
        if len(members) >= FEWEST and all(len({value.dtype for value in values}) == 1 for values in own):
            made = zip(own, scalars, written, strict=True)
            yield Batch(kind, members, tuple(_column(values, scalar, writes) for values, scalar, writes in made))


def _column(values: Sequence[Tensor], scalar: bool, written: bool) -> _Column:
    bytes_ = torch.tensor([value.numel() * value.element_size() for value in values], device="cpu")
    return _Column(values[0].dtype, scalar, written, sum(value.numel() for value in values), bytes_)


def _is_small(value: Tensor) -> bool:
    if isinstance(value, PackedTensor) or value.dim() == 0:
        return False
    return 0 < value.numel() <= MOST_ELEMENTS and value.is_contiguous()


@cache
def _copy() -> Callable[..., None]:
    """Return the function in C++: copies ``count`` tensors to ``flat``, or ``back`` from it."""
    pointers = ["const int64_t*", "const int64_t*", "char*"]
    return compiled_function([*pointers, "const int64_t", "const int64_t"], _COPY)
