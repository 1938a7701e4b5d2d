"""Count the bytes that eager ops, fxamp's gradient kernels and compiled optimizer steps move while a block runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.kernels.plan import Asked, Gradient, bytes_moved, make_plan
from fxamp.observe import CompiledStep, Event, GradientCheck, observing
from fxamp.tools.bench.traffic.generated import generated_traffic

#: Ops that overwrite a tensor without reading it.
_OVERWRITING = ("aten::copy_", "aten::zero_", "aten::fill_", "aten::_foreach_copy_", "aten::_foreach_zero_")
#: The gradients, second argument, are written only where ``grad_scale`` is given, whatever the schema says
#: (aten/src/ATen/native/cuda/fused_adam_utils.cuh stores the unscaled gradients then).
_FUSED = "aten::_fused_"


@dataclass
class Traffic:
    """Bytes of tensors of more than one element."""

    read: int = 0
    written: int = 0


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Count what runs inside. Compiled graphs other than optimizer steps, and the backward, count op by op, and only
    if Inductor did not compile them."""
    traffic = Traffic()
    with _OpTraffic(traffic), observing(lambda event: _counted(event, traffic)):
        yield traffic


class _OpTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traffic = traffic

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        name = func._schema.name
        changed = {argument.name for argument in func._schema.arguments if argument.is_write}
        if name.startswith(_FUSED) and kwargs.get("grad_scale") is None:
            changed.discard("grads")
        self._traffic.written += sum(_bytes(given.get(each)) for each in changed)
        if func.is_view:
            return result
        unread = changed if name in _OVERWRITING else {a.name for a in func._schema.arguments if a.is_out}
        self._traffic.read += sum(_bytes(value) for each, value in given.items() if each not in unread)
        if not changed:
            self._traffic.written += _bytes(result)
        return result


@contextmanager
def _counted(event: Event, traffic: Traffic) -> Iterator[None]:
    """Add what a compiled step's generated kernels move; without Inductor its ops are seen as they run.

    A check of gradients counts as planned for a GPU, instead of the ops that it runs on a CPU.
    """
    before = Traffic(traffic.read, traffic.written)
    yield
    if isinstance(event, GradientCheck):
        read, written = gradient_bytes(event.gradients, event.in_place)
        traffic.read, traffic.written = before.read + read, before.written + written
    elif isinstance(event, CompiledStep) and event.source is not None:
        read, written = _generated(event.source, event.elements)
        traffic.read, traffic.written = traffic.read + read, traffic.written + written


_generated = cache(generated_traffic)


def gradient_bytes(grads: Sequence[Tensor], in_place: bool) -> tuple[int, int]:
    """Return the bytes that the kernels' plan reads and writes for these gradients."""
    gradients = tuple(Gradient(g.numel(), g.dtype, g.dtype if in_place else None, True, True) for g in grads)
    moved = bytes_moved(make_plan(gradients, Asked(found_inf=True, flags=True), wave=32))
    written = sum(g.nbytes for g in grads) if in_place else 0
    return moved - written, written


def _bytes(value: Any) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.numel() > 1)
