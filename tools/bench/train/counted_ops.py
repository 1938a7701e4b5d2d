"""Counts the ops of one training step as they run: casts, host reads, checks in compiled backwards.

Code from Inductor calls no ops, so its casts are not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fxamp.tools.common.running_ops import RunningOps
from fxamp.torch_dtypes import NARROW
from fxamp.torch_private import running_backward


@dataclass
class Casts:
    """Conversions to or from a 16-bit floating-point dtype: how many, and the bytes they read and write together."""

    count: int = 0
    bytes: int = 0


class CountedOps(RunningOps):  # type: ignore[no-untyped-call]
    """Counts ops that run inside the mode.

    ``forward`` and ``backward``: the casts there. ``host_reads``: ops that copy a tensor's value to the host.
    ``check_bytes``: bytes of gradients that fxamp's checks for inf and NaN read and write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward, self.backward = Casts(), Casts()
        self.host_reads = self.check_bytes = 0

    def ran(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = f"{op.namespace}::{op.overloadpacket.__name__}"
        self.host_reads += name == "aten::_local_scalar_dense"
        if name == "aten::_to_copy":
            self._count_cast(args[0], result)
        elif name in _CHECKS:
            self.check_bytes += _CHECKS[name](args, result)

    def _count_cast(self, source: Tensor, result: Tensor) -> None:
        dtypes = {source.dtype, result.dtype}
        if (
            len(dtypes) < 2
            or not dtypes & NARROW.keys()
            or not (source.is_floating_point() and result.is_floating_point())
        ):
            return
        casts = self.backward if running_backward() != -1 else self.forward
        casts.count += 1
        casts.bytes += source.nbytes + result.nbytes


def nbytes(value: Any) -> int:
    """The bytes of all tensors in a nested value."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _widened(args: tuple[Any, ...], result: Any) -> int:
    """Every gradient is read, and its true value written; the 16-bit ones are widened on the way."""
    return nbytes(args[0]) + nbytes(result[0])


def _read_only(args: tuple[Any, ...], result: Any) -> int:
    return nbytes(args[0])


#: By op, the bytes of gradients that it moves: each gradient is read once, and each result written once.
_CHECKS: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    "fxamp::check_unscale": _widened,
    "fxamp::check_unscale_norm": _widened,
    "fxamp::check": _read_only,
}
