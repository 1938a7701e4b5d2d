"""scale-linear-losses: let a loss scale reach the gradients of torch's chunked ``functional.linear_cross_entropy``.

1. torch's op computes its gradients in the forward, before a loss scale applies, and in the dtype of its input. In
   float16, small gradients become zero before the backward multiplies them by the scale. So fxamp's own chunked loss
   replaces the op in float16, with the same chunks and the same dtype of the loss.
2. In other dtypes torch's op stays and follows its inputs, as under autocast. It also stays if no gradient is needed,
   or without a reduction, because then the backward computes the gradients.
"""

import operator
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter, all_graphs, all_nodes, argument, is_wrapper, op_name, tensor_value
from fxamp.kernels.linear_cross_entropy import CHUNKED
from fxamp.kernels.loss_chunks import MEAN, SUM, Gradients
from fxamp.passes.base import CastContext, Pass, Result, broken_by
from fxamp.passes.shared.cast_writer import before_cast
from fxamp.passes.shared.decision import decide, decision
from fxamp.torch_private import hint

#: torch's op, since 2.13; it returns the loss and three gradients.
_TORCHS = "torch_nn::_linear_cross_entropy_batch_chunked.default"

_REDUCTIONS = {"mean": MEAN, "sum": SUM}


@dataclass(frozen=True)
class ScaleLinearLosses(Pass[CastContext]):
    """Requires inserted casts; ensures rule 1."""

    name = "scale-linear-losses"

    def run(self, gm: GraphModule, context: CastContext) -> Result:
        replaced = 0
        for graph in all_graphs(gm):
            calls = [node for node in graph.graph.nodes if _loses_gradients(node)]
            for call in calls:
                _replace(call, GraphWriter(graph.graph, context.mode))
            replaced += len(calls)
        return Result(replaced)

    def ensures(self, gm: GraphModule, context: CastContext) -> str | None:
        return broken_by("losses with unscaled gradients", filter(_loses_gradients, all_nodes(gm)))


def _loses_gradients(node: Node) -> bool:
    if not isinstance(node.target, OpOverload) or op_name(node) != _TORCHS:
        return False
    rows, weight = (tensor_value(argument(node, name)) for name in ("input", "linear_weight"))
    if rows is None or weight is None or is_wrapper(rows) or is_wrapper(weight) or rows.dtype is not torch.float16:
        return False
    gradients = (f"compute_{name}_grad" for name in ("input", "linear_weight", "linear_bias"))
    return any(argument(node, name) for name in gradients) and hint(rows.shape[0]) is not None


def _replace(call: Node, writer: GraphWriter) -> None:
    rows, target, class_weight = (argument(call, name) for name in ("input", "target", "weight"))
    weight, bias = (before_cast(argument(call, name)) for name in ("linear_weight", "linear_bias"))
    value = tensor_value(rows)
    assert value is not None
    count = hint(value.shape[0])
    assert count is not None
    form = _REDUCTIONS[argument(call, "reduction")], argument(call, "ignore_index"), argument(call, "label_smoothing")
    chunks = max(1, -(-count // argument(call, "batch_chunk_size")))
    with call.graph.inserting_before(call):
        loss = writer.call(
            CHUNKED, rows, weight, bias, target, class_weight, *form, value.dtype, chunks, str(Gradients.IN_FORWARD),
            near=call, name="linear_cross_entropy",
        )  # fmt: skip
        choice = decision(call)
        if choice is not None:
            decide(loss, choice)
        rounded = writer.call(torch.ops.aten.to.dtype, loss, value.dtype, near=call, why=f"for {call.name}: as torch's")
    for item in list(call.users):
        assert item.target is operator.getitem
        item.replace_all_uses_with(rounded)  # a program reads only the first result; the others are for the backward
        call.graph.erase_node(item)
    call.graph.erase_node(call)
