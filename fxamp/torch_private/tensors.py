"""Tensors: compare many at once with earlier ones, set version numbers, query oneDNN; torch.func's wrappers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch._library.fake_class_registry import FakeScriptObject


def comparison_with(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that compares as many tensors with ``tensors``: class, dtype, device, sizes, strides.

    It reads these in C++, several times faster than Python reads one property, and holds no tensor. ``tensors`` are
    dense. It also returns False in another autograd mode, under another autocast, and if a tensor is passed twice.
    Breaks loudly, even if the number of tensors differs.
    """
    sizes, strides = ([list(read(tensor)) for tensor in tensors] for read in (Tensor.size, Tensor.stride))
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
    return guards.check


def set_version(tensors: Sequence[Tensor], version: int) -> None:
    """Set autograd's version number, which detects writes, of each of ``tensors`` and of their views. Breaks loudly."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), (version,) * len(tensors))


def onednn_computes(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has an LSTM for ``dtype`` on this CPU; one for float16 has no backward. Breaks loudly.

    ``torch.lstm`` asks torch the same, but not whether gradients are enabled.
    """
    if dtype is torch.float16:
        return not torch.is_grad_enabled() and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is not torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def real_object(value: Any) -> Any:
    """Return the object of the program that ``value`` stands for in a trace, such as a DeviceMesh; others unchanged.

    Breaks loudly.
    """
    return value.real_obj if isinstance(value, FakeScriptObject) else value


def outside_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of torch.func's transforms around ``tensor``. Breaks loudly."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


_CLOSES = {
    TransformType.Vmap: torch._C._functorch._vmap_decrement_nesting,
    TransformType.Grad: torch._C._functorch._grad_decrement_nesting,
    TransformType.Jvp: torch._C._functorch._jvp_decrement_nesting,
    TransformType.Functionalize: torch._C._functorch._func_decrement_nesting,
}


@contextmanager
def transforms_closed() -> Iterator[None]:
    """Close torch.func's transforms that an exception leaves open; later calls would run inside them. Breaks loudly."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    except BaseException:
        while torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
            # Torch's function for several levels closes two at once in 2.11.
            _CLOSES[peek_interpreter_stack().key()]()
        raise
