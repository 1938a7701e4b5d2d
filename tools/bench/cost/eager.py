"""Ops that run outside of the compiled graphs: what autograd fills in, what lies between the graphs."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.tools.bench.cost.count import Access, Kernel

#: Ops that move nothing.
_FREE = ("aten::empty", "aten::detach", "prim::")
#: Ops that only write: autograd's gradients of results that nobody used, and the like.
_FILLS = ("aten::zeros", "aten::ones", "aten::full", "aten::fill_", "aten::zero_", "aten::new_zeros")


class EagerOps(TorchDispatchMode):
    """Tells ``take`` of each op that moves bytes, as a kernel of ``stage``; set that while it runs.

    What compilers run to trace does not count.
    """

    def __init__(self, take: Callable[[Kernel], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stage = "forward"
        self._take = take

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        compiling = TracingContext.try_get() is not None
        if not (compiling or func.is_view or name.startswith(_FREE)):
            filled = name.startswith(_FILLS)
            reads = () if filled else _accesses((args, kwargs))
            kind = "zeros" if name == "aten::zeros" and self.stage == "backward" else "eager"
            self._take(Kernel(self.stage, kind, name.removeprefix("aten::"), reads, _accesses(result)))
        return result


def _accesses(values: Any) -> tuple[Access, ...]:
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    return tuple(Access("", tensor.nbytes, str(tensor.dtype).removeprefix("torch.")) for tensor in tensors)
