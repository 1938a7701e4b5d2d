"""Holds every ``torch._scaled_mm`` that runs on the CPU against the layouts that GPUs accept."""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.kernels.products import scaled_linear


class GpuLayouts(TorchDispatchMode):
    """Repeats each product on fake cuda tensors of the same sizes and strides, whose meta kernel refuses what GPUs do.

    ``products`` counts them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_mm.default:
            self.products += 1
            require_gpu_layouts(func, args, kwargs or {})
        return func(*args, **kwargs or {})


def require_gpu_layouts(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise what a GPU would if it refuses the layouts of these tensors, real or fake ones."""
    with FakeTensorMode() as mode:

        def on_cuda(value: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

        mode.allow_non_fake_inputs = True
        func(*pytree.tree_map_only(torch.Tensor, on_cuda, args), **pytree.tree_map_only(torch.Tensor, on_cuda, kwargs))


def product_on_gpu(recipe: str) -> Node:
    """The only product of blocks in the graph that a GPU runs for a linear layer."""

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return scaled_linear(x, weight, None, recipe, torch.bfloat16)

    with FakeTensorMode():
        x, weight = torch.empty(48, 64, dtype=torch.bfloat16, device="cuda"), torch.empty(96, 64, device="cuda")
        graph = make_fx(layer)(x, weight).graph
    (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)
    return product
