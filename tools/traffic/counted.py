"""Count the bytes that eager ops, fxamp's gradient kernels and compiled optimizer steps move while a block runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp import kernels
from fxamp.kernels.plan import Asked, Gradient, bytes_moved, make_plan
from fxamp.optim.lower import Lowered
from fxamp.tools.traffic.generated import generated_traffic

#: Ops that do not read what they write to.
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
    """Count what runs inside. Compiled graphs other than optimizer steps, and what autograd runs, count op by op only
    where they are not lowered by Inductor."""
    traffic = Traffic()
    with _OpTraffic(traffic), _kernels_counted(traffic), _steps_counted(traffic):
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
def _steps_counted(traffic: Traffic) -> Iterator[None]:
    """Adds what the kernels that Inductor generated for a step move; without Inductor, its ops are seen as they run."""
    real = Lowered.__call__

    def call(self: Lowered, *args: Any) -> None:
        if self.source is not None:
            read, written = _generated(self.source)
            traffic.read += read
            traffic.written += written
        real(self, *args)

    with patch.object(Lowered, "__call__", call):
        yield


_generated = cache(generated_traffic)


@contextmanager
def _kernels_counted(traffic: Traffic) -> Iterator[None]:
    """Adds what fxamp's scaler checks outside of graphs, as planned for a GPU; its ops on a CPU do not count."""

    def wrapped(function: Any, in_place: bool) -> Any:
        def run(grads: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
            before = Traffic(traffic.read, traffic.written)
            function(grads, *args, **kwargs)
            read, written = gradient_bytes(grads, in_place)
            traffic.read, traffic.written = before.read + read, before.written + written

        return run

    with (
        patch.object(kernels, "check_", wrapped(kernels.check_, in_place=False)),
        patch.object(kernels, "check_unscale_", wrapped(kernels.check_unscale_, in_place=True)),
    ):
        yield


def gradient_bytes(grads: Sequence[Tensor], in_place: bool) -> tuple[int, int]:
    """The bytes that the kernels' plan reads and writes for these gradients."""
    gradients = tuple(Gradient(g.numel(), g.dtype, g.dtype if in_place else None, True, True) for g in grads)
    moved = bytes_moved(make_plan(gradients, Asked(found_inf=True, flags=True), wave=32))
    written = sum(g.nbytes for g in grads) if in_place else 0
    return moved - written, written


def _bytes(value: Any) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.numel() > 1)
