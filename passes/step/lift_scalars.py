"""lift-scalars: pass a graph's symbolic floats as one tensor, so that a changed value does not recompile.

1. The inputs that are symbolic floats become one input, float64 ``[n]`` on the device of the graph's tensors; each
   float is an element of it. Arithmetic on such floats becomes arithmetic on 0-dim float64 tensors, with the precision
   of Python floats. A value read from a 0-dim tensor (``item``) becomes that tensor, in float64, so that the host reads
   nothing.
2. An op with a scalar argument gets the 0-dim tensor instead, rounded first to the dtype that the op computes in, as
   the op would round the scalar; the tables below list the ops. ``alpha`` and ``value`` become products. As torch's
   kernels do, an op on 16-bit floats computes in float32, products included, and rounds its result.

Inductor supports symbolic floats only as constants. A replayed CUDA graph reads a tensor again, but not a scalar.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymFloat
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter, dtype_of, first_computation
from fxamp.graph.depth_first import depth_first
from fxamp.passes.base import Context, Pass, Result, broken_by
from fxamp.torch_dtypes import NARROW

aten = torch.ops.aten

#: Name of the new input.
NUMBERS = "numbers"

_ARITHMETIC: dict[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
    operator.neg: aten.neg.default,
    operator.pow: aten.pow.Tensor_Tensor,
    math.sqrt: aten.sqrt.default,
    torch._sym_sqrt: aten.sqrt.default,  # type: ignore[attr-defined]
}

_TAKES_TENSOR: dict[Any, Any] = {
    **{op.Tensor: op.Tensor for op in (aten.mul, aten.add, aten.sub, aten.div)},
    **{op.Scalar: op.Tensor for op in (aten.mul, aten.add, aten.sub, aten.div)},
    aten.pow.Scalar: aten.pow.Tensor_Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.clamp_min.default: aten.clamp_min.Tensor,
    aten.clamp_max.default: aten.clamp_max.Tensor,
}

#: Comparisons are computed in the dtype of the tensor operand.
_COMPARES: dict[Any, Any] = {op.Scalar: op.Tensor for op in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)}


@dataclass(frozen=True)
class LiftScalars(Pass[Context]):
    """Requires ops of the tables wherever there is a symbolic float; ensures that no value in the graph is one."""

    name = "lift-scalars"

    def requires(self, gm: GraphModule, context: Context) -> str | None:
        unknown = {str(node.target) for node in _unknown(gm)}
        return f"no form with a tensor is known for the float of {', '.join(sorted(unknown))}" if unknown else None

    def run(self, gm: GraphModule, context: Context) -> Result:
        inputs = [node for node in gm.graph.find_nodes(op="placeholder") if _is_scalar(node)]
        if not inputs and not reads_on_host(gm):
            return Result(0)
        writer = _Writer(gm, context, inputs)
        rewritten = 0
        for node in list(gm.graph.nodes):
            if node.op == "call_function" and (_reads_scalar(node) or _is_scalar(node)):
                with gm.graph.inserting_before(node):
                    writer.rewrite(node)
                rewritten += 1
        for node in reversed(list(gm.graph.nodes)):
            if _is_scalar(node) and not node.users:
                gm.graph.erase_node(node)
        return Result(rewritten)

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        return broken_by("floats are left", filter(_is_scalar, gm.graph.nodes))


def liftable(gm: GraphModule) -> bool:
    """Whether the pass supports every op of the graph that takes a symbolic float."""
    return not _unknown(gm)


def unliftable_inputs(gm: GraphModule) -> frozenset[int]:
    """Return the indices of the symbolic float inputs, among such inputs, that reach an unsupported op."""
    reaching = {*depth_first(_unknown(gm), lambda node: filter(_is_scalar, node.all_input_nodes))}
    inputs = [node for node in gm.graph.find_nodes(op="placeholder") if _is_scalar(node)]
    return frozenset(at for at, node in enumerate(inputs) if node in reaching)


def reads_on_host(gm: GraphModule) -> bool:
    """Whether the graph reads a tensor's value on the host."""
    return bool(gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default))


_FILLS = (aten.full.default, aten.full_like.default, aten.scalar_tensor.default)
_VALUED = {aten.addcmul.default: aten.mul.Tensor, aten.addcdiv.default: aten.div.Tensor}
_SPECIAL = (aten.rsub.Scalar, aten.lerp.Scalar, *_FILLS, *_VALUED, *_COMPARES)


def _unknown(gm: GraphModule) -> list[Node]:
    nodes = (node for node in gm.graph.nodes if node.op == "call_function")
    return [node for node in nodes if (_reads_scalar(node) or _is_scalar(node)) and not _known(node)]


def _known(node: Node) -> bool:
    if _is_scalar(node):
        return node.target in _ARITHMETIC or node.target is aten._local_scalar_dense.default
    return node.target in _TAKES_TENSOR or node.target in _SPECIAL


def _is_scalar(node: object) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), SymFloat)


def _reads_scalar(node: Node) -> bool:
    return any(_is_scalar(source) for source in node.all_input_nodes)


class _Writer:
    """Holds the 0-dim tensor of every symbolic float."""

    def __init__(self, gm: GraphModule, context: Context, inputs: list[Node]) -> None:
        self._graph, self._writer = gm.graph, GraphWriter(gm.graph, context.mode)
        self._call: Callable[..., Node] = self._writer.call
        tensors = (
            n.meta["val"] for n in gm.graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.Tensor)
        )
        self._device = next(tensors).device
        self._of: dict[Node, Node] = {}
        if inputs:
            self._one_input(inputs)

    def _one_input(self, inputs: list[Node]) -> None:
        numbers = self._writer.input(NUMBERS, len(inputs), dtype=torch.float64, device=self._device, before=inputs[0])
        with self._graph.inserting_before(first_computation(self._graph)):
            for at, node in enumerate(inputs):
                self._of[node] = self._call(aten.select.int, numbers, 0, at)

    def rewrite(self, node: Node) -> None:
        """Apply rules 1 and 2, by the tables."""
        if node.target is aten._local_scalar_dense.default:
            self._of[node] = self._writer.in_dtype(node.args[0], torch.float64)  # type: ignore[arg-type]
            return
        if _is_scalar(node):
            operands = [self._rounded(value, torch.float64) for value in node.args]
            self._of[node] = self._call(_ARITHMETIC[node.target], *operands)
            return
        new = self._tensor_op(node)
        dtype = dtype_of(node)
        node.replace_all_uses_with(new if dtype is None else self._writer.in_dtype(new, dtype))
        self._graph.erase_node(node)

    def _tensor_op(self, node: Node) -> Node:
        target, kwargs = node.target, dict(node.kwargs)
        args = list(node.args if target in (*_FILLS, *_COMPARES) else map(self._wide, node.args))
        if target is aten.rsub.Scalar:
            alpha = args[2] if len(args) > 2 else kwargs.get("alpha", 1)
            scaled = args[0] if alpha == 1 else self._call(aten.mul.Tensor, args[0], self._operand(alpha, node))
            return self._call(aten.sub.Tensor, self._operand(args[1], node), scaled)
        if target in _VALUED:
            scaled = self._call(_VALUED[target], *args[1:])
            return self._call(
                aten.add.Tensor, args[0], self._call(aten.mul.Tensor, scaled, self._operand(kwargs["value"], node))
            )
        if target is aten.lerp.Scalar:
            return self._call(aten.lerp.Tensor, *args[:2], self._operand(args[2], node))
        if target in _FILLS:
            fill = args[0] if target is aten.scalar_tensor.default else args[1]
            shape = list(node.meta["val"].shape)
            return self._call(aten.clone.default, self._call(aten.expand.default, self._operand(fill, node), shape))
        if target in _COMPARES:
            dtype = node.all_input_nodes[0].meta["val"].dtype
            return self._call(_COMPARES[target], args[0], self._rounded(args[1], dtype))
        if "alpha" in kwargs:
            alpha = self._operand(kwargs.pop("alpha"), node)
            args[1] = self._call(aten.mul.Tensor, self._operand(args[1], node), alpha)
        return self._call(_TAKES_TENSOR[target], *(self._operand(value, node) for value in args), **kwargs)

    def _wide(self, value: Any) -> Any:
        """Return a 16-bit tensor in float32; other values unchanged."""
        return self._writer.in_dtype(value, torch.float32) if dtype_of(value) in NARROW else value

    def _operand(self, value: Any, node: Node) -> Any:
        result = node.meta["val"]
        wide = result.dtype in NARROW and node.target not in _FILLS
        return self._rounded(value, torch.float32 if wide else result.dtype)

    def _rounded(self, value: Any, dtype: torch.dtype) -> Any:
        """Return a symbolic float as a tensor that the op can take; other values unchanged."""
        if isinstance(value, (int, float)):
            return self._call(aten.full.default, [], float(value), dtype=dtype, device=self._device)
        return self._writer.in_dtype(self._of[value], dtype) if _is_scalar(value) else value
