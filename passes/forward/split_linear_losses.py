"""split-linear-losses: write torch's chunked ``functional.linear_cross_entropy`` as a linear layer and its loss.

1. The policy then decides the dtype of each, and chunk-losses cuts them into as many rows as the program asked for.
   torch's own op computes in the dtype of its input, whatever autocast says of products and losses; in float16 it makes
   its gradients in the forward, where no loss scale is, and small ones become zero.
2. An op on float64 stays, and so does one on tensors that are no plain ones.
"""

import operator
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter, all_graphs, argument, is_wrapper, op_name, tensor_value
from fxamp.kernels.linear_cross_entropy import MEAN, NONE, SUM
from fxamp.passes.base import CastContext, Pass, Result
from fxamp.passes.shared.linear_losses import ROWS
from fxamp.torch_dtypes import NARROW

aten = torch.ops.aten

#: torch's ops, since 2.13; that of the reductions returns its gradients too.
_REDUCING = "torch_nn::_linear_cross_entropy_batch_chunked.default"
_NOT_REDUCING = "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction.default"

_REDUCTIONS = {"mean": MEAN, "sum": SUM}


@dataclass(frozen=True)
class SplitLinearLosses(Pass[CastContext]):
    """Requires a captured graph; ensures rules 1 and 2."""

    name = "split-linear-losses"

    def run(self, gm: GraphModule, context: CastContext) -> Result:
        split = 0
        for graph in all_graphs(gm):
            calls = [node for node in graph.graph.nodes if _splittable(node)]
            for call in calls:
                _split(call, GraphWriter(graph.graph, context.mode))
            if calls:
                graph.recompile()
            split += len(calls)
        return Result(split)

    def ensures(self, gm: GraphModule, context: CastContext) -> str | None:
        left = [node.name for graph in all_graphs(gm) for node in graph.graph.nodes if _splittable(node)]
        return f"chunked losses of torch left: {', '.join(left)}" if left else None


def _splittable(node: Node) -> bool:
    if not isinstance(node.target, OpOverload) or op_name(node) not in (_REDUCING, _NOT_REDUCING):
        return False
    values = [tensor_value(argument(node, name)) for name in ("input", "linear_weight")]
    if any(v is None or is_wrapper(v) or v.dtype not in (torch.float32, *NARROW) for v in values):
        return False
    return all(user.target is operator.getitem for user in node.users) if op_name(node) == _REDUCING else True


def _split(call: Node, writer: GraphWriter) -> None:
    rows, weight, bias, target = (argument(call, name) for name in ("input", "linear_weight", "linear_bias", "target"))
    value = tensor_value(rows)
    assert value is not None
    form = argument(call, "weight"), _REDUCTIONS.get(argument(call, "reduction"), NONE), argument(call, "ignore_index")
    with call.graph.inserting_before(call):
        operands = [rows, *(_in_dtype(operand, value.dtype, call, writer) for operand in (weight, bias))]
        logits = writer.call(aten.linear.default, *operands, near=call, name="linear")
        loss = writer.call(aten.cross_entropy_loss.default, logits, target, *form, near=call)
    loss.meta[ROWS] = argument(call, "batch_chunk_size")
    if op_name(call) == _REDUCING:
        for item in list(call.users):  # the program reads the first alone
            item.replace_all_uses_with(loss)
            call.graph.erase_node(item)
    else:
        call.replace_all_uses_with(loss)
    call.graph.erase_node(call)


def _in_dtype(operand: Node | None, dtype: torch.dtype, call: Node, writer: GraphWriter) -> Node | None:
    value = None if operand is None else tensor_value(operand)
    if operand is None or value is None or value.dtype is dtype:
        return operand
    return writer.call(aten.to.dtype, operand, dtype, near=call, why=f"for {call.name}: as its input")
