"""fit-constants: clamp constants that were written for float32 to the range of the dtype that an op now runs in.

``masked_fill(x, torch.finfo(x.dtype).min)`` is captured with float32's lowest number. If ``x`` becomes 16-bit, the
constant overflows, and the op raises. Infinities stay, because every floating-point dtype has them.
"""

import math
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fxamp.graph import INSERTED, GraphWriter, all_nodes, arguments, base_name, dtype_of, set_argument
from fxamp.passes.base import CastContext, GraphwisePass, broken_by
from fxamp.torch_dtypes import NARROW

#: Ops that convert a constant to the dtype they run in and raise if it does not fit, with the constants' arguments.
_CONSTANTS: dict[str, tuple[str, ...]] = {
    "aten::clamp": ("min", "max"),
    "aten::clamp_max": ("max",),
    "aten::clamp_min": ("min",),
    "aten::constant_pad_nd": ("value",),
    "aten::fill": ("value",),
    "aten::full": ("fill_value",),
    "aten::full_like": ("fill_value",),
    "aten::hardtanh": ("min_val", "max_val"),
    "aten::index_fill": ("value",),
    "aten::masked_fill": ("value",),
    "aten::new_full": ("fill_value",),
    "aten::pad": ("value",),
    "aten::scatter": ("value",),
    "aten::threshold": ("threshold", "value"),
    "aten::where": ("self", "other"),
}


@dataclass(frozen=True)
class FitConstants(GraphwisePass[CastContext]):
    """Requires values on all nodes; ensures that no finite constant of these ops is outside the range of its dtype."""

    name = "fit-constants"

    def rewrite(self, gm: GraphModule, context: CastContext) -> int:
        writer = GraphWriter(gm.graph, context.mode)
        return sum(_fit(node, writer) for node in list(gm.graph.nodes))

    def ensures(self, gm: GraphModule, context: CastContext) -> str | None:
        return broken_by("constants out of range", filter(_misfits, all_nodes(gm)))


def _fit(node: Node, writer: GraphWriter) -> int:
    misfits = _misfits(node)
    for name, value, limits in misfits:
        set_argument(node, name, min(max(value, limits.min), limits.max))
    return len(misfits) + _fit_tensor(node, writer)


def _misfits(node: Node) -> list[tuple[str, float, torch.finfo]]:
    """Return ``(argument, value, range)`` for each constant that does not fit."""
    names = _CONSTANTS.get(base_name(node), ()) if isinstance(node.target, OpOverload) else ()
    dtype = dtype_of(node)
    if not names or dtype is None or dtype not in NARROW:
        return []
    limits = torch.finfo(dtype)
    misfits = []
    for argument, value in arguments(node):
        if argument.name not in names or not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if math.isfinite(value) and not limits.min <= value <= limits.max:
            misfits.append((argument.name, float(value), limits))
    return misfits


def _fit_tensor(node: Node, writer: GraphWriter) -> int:
    """Clamp a constant that is a 0-dim float32 tensor before the op reads it."""
    if base_name(node) != "aten::masked_fill" or len(node.args) < 3:
        return 0
    dtype, source = dtype_of(node), node.args[2]
    if dtype is None or dtype not in NARROW or dtype_of(source) is not torch.float32:
        return 0
    if isinstance(source, Node) and INSERTED in source.meta:
        return 0
    limits = torch.finfo(dtype)
    why = f"for {node.name}: the constant must fit {dtype}"
    with node.graph.inserting_before(node):
        clamped = writer.call(torch.ops.aten.clamp.default, source, limits.min, limits.max, why=why)
    node.update_arg(2, clamped)
    return 1
