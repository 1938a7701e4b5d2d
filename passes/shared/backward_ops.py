"""Facts about ATen's backward ops that neither schemas nor fake kernels provide."""

import torch
from torch.fx import Node

from fxamp.graph import argument, arguments, base_name, set_argument, tensor_value
from fxamp.passes.base import CastContext
from fxamp.passes.shared.cast_rules import Edit, edit_for
from fxamp.passes.shared.kernel_table import HAS_HALF_KERNEL_FOR_SOME_SIZES, LACKS_HALF_KERNEL, LACKS_HALF_KERNEL_ON_CPU
from fxamp.policy import Rule
from fxamp.torch_dtypes import NARROW

#: Arguments that kernels need in float32 together with 16-bit inputs.
_FLOAT32 = frozenset({"logsumexp"})

#: Statistics of a forward norm: kernels of accelerators need them in float32, those of the CPU in the weight's dtype.
_STATISTICS = frozenset({"mean", "rstd", "save_mean", "save_invstd", "save_var"})


def backward_edit(rule: Rule, node: Node, lower: torch.dtype, context: CastContext) -> Edit:
    """Return the edit that ``rule`` asks for at an op of a backward graph, except what its kernel needs in float32."""
    edit = edit_for(rule, node, lower, context)
    value = tensor_value(node.args[0]) if node.args else None
    on_cpu = value is not None and value.device.type == "cpu"
    names = _FLOAT32 if on_cpu else _FLOAT32 | _STATISTICS
    exact = {arg for parameter, arg in arguments(node) if parameter.name in names and isinstance(arg, Node)}
    return Edit({source: d for source, d in edit.casts.items() if d not in NARROW or source not in exact}, edit.kwargs)


def missing_kernel(node: Node, edit: Edit) -> str | None:
    """Return why the op cannot run on 16-bit inputs, or None: a backward lacks a kernel if its forward does."""
    if not any(dtype in NARROW for dtype in edit.casts.values()):
        return None
    name = base_name(node).removesuffix("_backward")
    on_cpu = any(value.device.type == "cpu" for source in edit.casts if (value := tensor_value(source)) is not None)
    if name in LACKS_HALF_KERNEL | HAS_HALF_KERNEL_FOR_SOME_SIZES or (on_cpu and name in LACKS_HALF_KERNEL_ON_CPU):
        return "it has no 16-bit kernel on this device"
    return None


def follow_input_dtype(node: Node) -> None:
    """Set ``input_dtype``, which names the result's dtype, to the dtype of the gradient that the op now reads."""
    gradient = tensor_value(node.args[0]) if node.args else None
    if gradient is not None and argument(node, "input_dtype") is not None:
        set_argument(node, "input_dtype", gradient.dtype)
