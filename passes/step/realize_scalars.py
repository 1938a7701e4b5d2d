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
from fxamp.passes.shared.realize import Realize

aten = torch.ops.aten

_COSTLY = frozenset(
    {aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar, aten.exp.default, aten.log.default}
)


@dataclass(frozen=True)
class RealizeScalars(Realize):
    """Ensures that no op on tensors of one dimension or more directly reads a 0-dim result of a power."""

    name = "realize-scalars"

    def selected(self, gm: GraphModule) -> list[Node]:
        """Return each costly 0-dim value without its own buffer that an op on larger tensors reads."""
        costly: dict[Node, None] = {}
        for node in gm.graph.nodes:
            if node.op != "call_function" or _dimensions(node) != 0 or node.target is aten.as_strided.default:
                continue
            if node.target in _COSTLY or any(source in costly for source in node.all_input_nodes):
                costly[node] = None
        return [node for node in costly if any(map(self.reads_realized, node.users))]

    def reads_realized(self, reader: Node) -> bool:
        return bool(_dimensions(reader))

    def realized(self, writer: GraphWriter, node: Node) -> Node:
        return writer.call(aten.as_strided.default, node, [], [])


def _dimensions(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, Tensor) else None
