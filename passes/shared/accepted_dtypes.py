"""Which ops reject the dtypes that upstream casts would give them, and which dtypes to give them instead.

A program that runs in float32 must run under every policy. Fake kernels accept more than real ones do, so a table says
what real kernels accept. An op whose floating-point inputs must agree, and that does not promote them itself, never
gets mixed dtypes; an op without a 16-bit kernel on a device never gets 16-bit inputs there.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from fxamp.graph import base_name, dtype_of, floating_inputs, is_custom, tensor_value, writes
from fxamp.passes.shared.kernel_table import (
    HAS_HALF_KERNEL_FOR_SOME_SIZES,
    LACKS_HALF_KERNEL,
    LACKS_HALF_KERNEL_ON_CPU,
    PROMOTES,
    TAKES_BFLOAT16,
    TAKES_FLOAT32_PARAMETERS,
    UNPROMOTED_POINTWISE,
)
from fxamp.torch_dtypes import NARROW


def rejection(node: Node, captured: Mapping[Node, Any]) -> str | None:
    """Return why the op would reject its inputs' current dtypes, or None if it accepts them.

    ``captured`` holds the values that nodes had when the program was captured.
    """
    if not isinstance(node.target, OpOverload):
        return None
    values = {source: tensor_value(source) for source in floating_inputs(node) if not _is_converted(source, node)}
    dtypes = {value.dtype for value in values.values() if value is not None}
    if len(dtypes - {torch.float64}) > 1 and not _takes_mixture(node) and not _custom_as_captured(node, captured):
        return "its floating-point inputs must have one dtype"
    if base_name(node) in TAKES_BFLOAT16 and dtypes != {torch.bfloat16}:
        return "it takes bfloat16 alone"
    if lacks_kernel(node):
        return "it has no 16-bit kernel on this device"
    if reads_bits(node) and cast_back(node, captured):
        return "it reads the bits of its input"
    if NARROW.keys() & dtypes and base_name(node) in HAS_HALF_KERNEL_FOR_SOME_SIZES:
        return None if _captured_half(node, captured) else "it may have no 16-bit kernel for these sizes"
    return None


def reads_bits(node: Node) -> bool:
    """Whether the op takes its input's memory for that of another dtype, so that sizes and values depend on it."""
    return node.target in (torch.ops.aten.view.dtype, torch.ops.aten.view_copy.dtype)


def _is_converted(source: Node, node: Node) -> bool:
    """Whether ``node`` accepts ``source`` in any dtype: the 0-dim weight of ``lerp``."""
    if base_name(node) != "aten::lerp" or source in (*node.args[:2], node.kwargs.get("end")):
        return False
    weight = tensor_value(source)
    return weight is not None and weight.dim() == 0


def _custom_as_captured(node: Node, captured: Mapping[Node, Any]) -> bool:
    """Whether a custom op gets its captured dtypes, because no table says what else it accepts."""
    before = {source: captured.get(source) for source in floating_inputs(node)}
    same = all(isinstance(value, torch.Tensor) and value.dtype == dtype_of(source) for source, value in before.items())
    return same and is_custom(node.target)


def lacks_kernel(node: Node, written: bool = True) -> bool:
    """Whether the op now gets 16-bit inputs but has no kernel for them on their device.

    ``written``: whether what the op writes to counts as an input.
    """
    if not isinstance(node.target, OpOverload) or not _without_kernel(node):
        return False
    ignored = [] if written else writes(node)
    return any(dtype_of(source) in NARROW for source in floating_inputs(node) if source not in ignored)


def _takes_mixture(node: Node) -> bool:
    assert isinstance(node.target, OpOverload)
    name = base_name(node)
    if name in UNPROMOTED_POINTWISE:
        return False
    if torch.Tag.pointwise in node.target.tags or name in PROMOTES:
        return True
    if name not in TAKES_FLOAT32_PARAMETERS:
        return False
    rest = [dtype_of(source) for source in floating_inputs(node) if source is not node.args[0]]
    return dtype_of(node.args[0]) in NARROW and all(dtype is torch.float32 for dtype in rest)


def _without_kernel(node: Node) -> bool:
    name = base_name(node)
    values = [tensor_value(source) for source in floating_inputs(node)]
    on_cpu = any(value is not None and value.device.type == "cpu" for value in values)
    return name in LACKS_HALF_KERNEL or (on_cpu and name in LACKS_HALF_KERNEL_ON_CPU)


def _captured_half(node: Node, captured: Mapping[Node, Any]) -> bool:
    values = [captured.get(source) for source in node.all_input_nodes]
    return any(isinstance(value, torch.Tensor) and value.dtype in NARROW for value in values)


def cast_back(node: Node, captured: Mapping[Node, Any]) -> dict[Node, torch.dtype]:
    """Return the casts that give ``node`` dtypes it accepts: those of the memory it writes to, else the captured ones.

    A tensor that the node writes to is never cast: the write would not reach the user's tensor. A program captured
    under autocast may have mixed dtypes; it gets the widest of them, or float32 if that is a 16-bit dtype without a
    kernel.
    """
    written = [source for source in writes(node) if tensor_value(source) is not None]
    opaque = not isinstance(node.target, OpOverload)
    floats = floating_inputs(node)
    if written and not opaque:
        dtype = dtype_of(written[0])
        assert dtype is not None
        others = [source for source in floats if source not in written and dtype_of(source) != dtype]
        return dict.fromkeys(others, dtype) if dtype.is_floating_point else {}
    before = {source: captured.get(source) for source in floats}
    dtypes = {s: v.dtype for s, v in before.items() if isinstance(v, torch.Tensor)}
    if not opaque and _without_kernel(node):
        dtypes = {s: torch.float32 if dtype in NARROW else dtype for s, dtype in dtypes.items()}
    if len(set(dtypes.values())) > 1 and not opaque:
        widest = max(dtypes.values(), key=lambda dtype: dtype.itemsize)
        dtypes = dict.fromkeys(dtypes, torch.float32 if widest in NARROW else widest)
    return {source: dtype for source, dtype in dtypes.items() if dtype_of(source) != dtype}
