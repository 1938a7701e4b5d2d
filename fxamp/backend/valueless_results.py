"""The tensor that a caller gets for a result that a policy drops: its shape, dtype and device, without values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxamp.errors import DroppedResultError
from fxamp.graph import graph_output
from fxamp.passes.forward.drop_results import DROPPED, DroppedResult
from fxamp.pipeline.participant import Participant

_PROPERTIES = (
    "device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta is_mps is_nested is_quantized is_sparse is_xpu itemsize "
    "layout ndim requires_grad shape"
)
_METHODS = (
    "__hash__ __len__ __repr__ dim element_size get_device is_complex is_contiguous is_floating_point is_inference "
    "ndimension nelement numel size stride"
)

#: The functions of torch that read no values.
_WITHOUT_VALUES = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(Tensor, name) for name in _METHODS.split()),
        *(torch.is_complex, torch.is_floating_point, torch.numel),
    }
)


class ValuelessTensor(Tensor):
    """A tensor without values: reading anything but its shape, dtype and device raises DroppedResultError."""

    why: str

    @staticmethod
    def __new__(cls, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, why: str) -> "ValuelessTensor":
        tensor: ValuelessTensor = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        tensor.why = why
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        used = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        raise DroppedResultError(used[0].why)

    def __repr__(self) -> str:  # type: ignore[override]  # a debugger prints it: so it says instead of raising
        return f"<no values: {self.why}>"


@dataclass(frozen=True)
class ValuelessResults(Participant):
    """Gives the caller a :class:`ValuelessTensor` for each dropped result."""

    def run(self, run: Callable[..., Any], gm: GraphModule, lowering: str) -> Callable[..., Any]:
        dropped: tuple[DroppedResult, ...] = graph_output(gm.graph).meta.get(DROPPED, ())
        return _filling(run, dropped) if dropped else run


def _filling(run: Callable[..., Any], dropped: tuple[DroppedResult, ...]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        sizes = [tuple(read(args) for read in result.sizes) for result in dropped]
        results = list(run(*args))
        for result, size in zip(dropped, sizes, strict=True):
            results[result.at] = ValuelessTensor(size, result.dtype, result.device, result.why)
        return tuple(results)

    return call
