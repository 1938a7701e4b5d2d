"""realize-scalars: compute a 0-dim value that involves a power once, not in every thread of every kernel that uses it.

Inductor inlines 0-dim arithmetic into the kernels that read its result. Adam's bias correction has two float64 powers;
each thread would compute them again, and most GPUs have few float64 units. If a larger tensor is combined with such a
value, this pass inserts ``aten.as_strided``, which changes nothing but which Inductor lowers to a separate buffer
(torch/_inductor/lowering.py, ``as_strided`` realizes its input).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter
from fxamp.passes.base import Context, Pass, Result

aten = torch.ops.aten

_COSTLY = frozenset(
    {
        aten.pow.Tensor_Tensor,
        aten.pow.Tensor_Scalar,
        aten.pow.Scalar,
        aten.exp.default,
        aten.log.default,
    }
)


@dataclass(frozen=True)
class RealizeScalars(Pass[Context]):
    """Ensures that no op on tensors of one dimension or more directly reads a 0-dim result of a power."""

    name = "realize-scalars"

    def run(self, gm: GraphModule, context: Context) -> Result:
        read_by_larger = _read_by_larger(gm)
        writer = GraphWriter(gm.graph, context.mode)
        for node, users in read_by_larger.items():
            with gm.graph.inserting_after(node):
                realized = writer.call(aten.as_strided.default, node, [], [])
            for user in users:
                user.replace_input_with(node, realized)
        return Result(len(read_by_larger))

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        left = [node.name for node in _read_by_larger(gm)]
        return f"inlined into larger kernels: {', '.join(left)}" if left else None


def _read_by_larger(gm: GraphModule) -> dict[Node, list[Node]]:
    """Return each costly 0-dim value without its own buffer, and the ops on larger tensors that read it."""
    costly: set[Node] = set()
    read_by_larger: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or _dimensions(node) != 0 or node.target is aten.as_strided.default:
            continue
        if node.target not in _COSTLY and not any(source in costly for source in node.all_input_nodes):
            continue
        costly.add(node)
        users = [user for user in node.users if _dimensions(user)]
        if users:
            read_by_larger[node] = users
    return read_by_larger


def _dimensions(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, Tensor) else None
