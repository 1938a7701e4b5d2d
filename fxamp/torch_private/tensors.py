"""Tensors: compare many at once with what they were; which dtypes oneDNN computes in."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards


def comparison_with(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function of as many tensors: whether each has the class, dtype, device, sizes and strides of its own.

    It reads all that in C++, several times faster than Python reads one property; holds no tensor. ``tensors`` are
    dense. It is also False in another autograd mode, under another autocast, and for a tensor that is given twice.
    Breaks loudly, also where the number of tensors differs.
    """
    sizes, strides = ([list(read(tensor)) for tensor in tensors] for read in (Tensor.size, Tensor.stride))
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
    return guards.check


def onednn_computes(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has kernels for ``dtype`` on this CPU: ``torch.lstm`` asks it too. Breaks loudly."""
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is not torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
