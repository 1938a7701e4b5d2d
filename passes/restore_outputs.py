"""restore-outputs: a compiled graph hands out the dtypes that it was captured with.

Dynamo traces the code after a graph break with the captured dtypes; a 16-bit tensor there would meet float32 weights
and fail. Policies with ``outputs = "keep"`` hand out what the casts give instead.
"""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxamp.capture import OUTPUT_DTYPES
from fxamp.graph import graph_output, tensor_value
from fxamp.passes.base import Context, Pass, Result
from fxamp.passes.cast_writer import CastWriter


@dataclass(frozen=True)
class RestoreOutputs(Pass):
    """Requires the captured dtypes on the output node; ensures that every floating output has its captured dtype."""

    name = "restore-outputs"

    def requires(self, gm: GraphModule, context: Context) -> str | None:
        return None if OUTPUT_DTYPES in graph_output(gm.graph).meta else "the output node lacks the captured dtypes"

    def run(self, gm: GraphModule, context: Context) -> Result:
        if context.policy.outputs == "keep":
            return Result(0)
        output = graph_output(gm.graph)
        writer = CastWriter(gm.graph, grad=False)
        leaves, spec = pytree.tree_flatten(output.args[0])
        wrong = _wrong(output)
        for index, dtype in wrong.items():
            leaves[index] = writer.cast(leaves[index], dtype, output, "the captured output dtype")
        if wrong:
            output.args = (pytree.tree_unflatten(leaves, spec),)
            gm.recompile()
        return Result(len(wrong), {"outputs restored": len(wrong)})

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        wrong = _wrong(graph_output(gm.graph))
        if context.policy.outputs == "keep" or not wrong:
            return None
        return f"outputs {sorted(wrong)} have other dtypes than captured"


def _wrong(output: Node) -> dict[int, torch.dtype]:
    """By position, the captured dtype of each floating output that now has another."""
    wrong: dict[int, torch.dtype] = {}
    captured: list[torch.dtype | None] = output.meta[OUTPUT_DTYPES]
    for index, (leaf, dtype) in enumerate(zip(pytree.tree_leaves(output.args[0]), captured, strict=True)):
        value = tensor_value(leaf)
        if value is not None and dtype is not None and value.is_floating_point() and value.dtype != dtype:
            wrong[index] = dtype
    return wrong
