"""Ops outside of the compiled graphs: those that autograd adds, and those between the graphs."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fxamp.tools.bench.cost.count import Access, Kernel
from fxamp.tools.bench.cost.schedule import word
from fxamp.tools.common.running_ops import RunningOps
from fxamp.torch_private.parts.fx import TracingContext

#: Ops that move nothing; the schema of ``_unsafe_view`` does not show that it is a view.
_FREE = ("aten::empty", "aten::detach", "aten::_unsafe_view", "prim::")
#: Ops that only write: autograd's gradients of unused results, and the like.
_FILLS = ("aten::zeros", "aten::ones", "aten::full", "aten::fill_", "aten::zero_", "aten::new_zeros")


class EagerOps(RunningOps):  # type: ignore[no-untyped-call]
    """Passes each op that moves bytes to ``take``, as a kernel of ``stage``, which may be set meanwhile."""

    def __init__(self, take: Callable[[Kernel], None]) -> None:
        super().__init__()
        self.stage = "forward"
        self._take = take

    def ran(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = op._schema.name
        compiling = TracingContext.try_get() is not None
        if not (compiling or op.is_view or name.startswith(_FREE)):
            filled = name.startswith(_FILLS)
            reads = () if filled else _accesses((args, kwargs))
            kind = "zeros" if name == "aten::zeros" and self.stage == "backward" else "eager"
            word = "copy to the host" if _leaves_device(args, result) else name.removeprefix("aten::")
            self._take(Kernel(self.stage, kind, word, reads, _accesses(result)))


def _accesses(values: Any) -> tuple[Access, ...]:
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    return tuple(Access("", tensor.nbytes, word(tensor.dtype)) for tensor in tensors)


def _leaves_device(args: Any, result: Any) -> bool:
    """Whether a copy of a tensor on the GPU is made for the host, which then waits for it."""
    sources, targets = (
        {leaf.device.type for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)}
        for values in (args, result)
    )
    return targets == {"cpu"} and bool(sources - {"cpu"})
