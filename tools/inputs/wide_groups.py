"""Products of experts in float64, for references: torch multiplies groups in float32 and 16 bits only."""

from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def in_float64() -> AbstractContextManager[object]:
    """Within the block, ``F.grouped_mm`` takes operands in float64, and multiplies one matrix after another."""
    mode: AbstractContextManager[object] = _Groups()  # type: ignore[no-untyped-call]
    return mode


class _Groups(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._grouped_mm.default and args[0].dtype is torch.float64:
            return _product(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def _product(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """As ``F.grouped_mm``, without bias, which it refuses too; what is in no group is zero."""
    if offs is None:
        return left @ right
    spans = [slice(*pair) for pair in pairwise([0, *offs.tolist()])]
    if left.dim() == right.dim() == 2:
        return torch.stack([left[:, span] @ right[span] for span in spans])
    result = left.new_zeros(left.shape[-2], right.shape[-1])
    for at, span in enumerate(spans):
        if left.dim() == 2:
            result[span] = left[span] @ right[at]
        else:
            result[:, span] = left[at] @ right[:, span]
    return result
