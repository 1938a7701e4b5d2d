"""The base of passes that make Inductor write values of AOTAutograd's graphs to memory in their own shape.

They insert Inductor's own primitive, which does nothing in other compilers.
"""

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter
from fxamp.passes.base import Context, Result, TracedPass


@dataclass(frozen=True)
class Realize(TracedPass[Context]):
    """Realizes the nodes that a subclass selects; their readers read the written value. Ensures that none is left."""

    @abstractmethod
    def selected(self, gm: GraphModule) -> list[Node]:
        """Return the nodes to realize, each once, without those that have been realized."""

    def run(self, gm: GraphModule, context: Context) -> Result:
        from fxamp.torch_private.parts.inductor import inductor_prims

        nodes = self.selected(gm)
        writer = GraphWriter(gm.graph, context.mode)
        for node in nodes:
            readers = list(node.users)
            with gm.graph.inserting_after(node):
                realized = writer.call(inductor_prims.force_stride_order, node, list(node.meta["val"].stride()))
            for reader in readers:
                reader.replace_input_with(node, realized)
        return Result(len(nodes))

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        left = [node.name for node in self.selected(gm)]
        return f"not realized: {', '.join(left)}" if left else None


def is_realized(node: Node) -> bool:
    """Whether ``node`` is what a value was realized as."""
    return isinstance(node.target, OpOverload) and node.target._schema.name == "prims::inductor_force_stride_order"


def can_be_realized(value: Tensor) -> bool:
    """Whether ``value`` has fixed strides and a device other than the CPU, whose loops Inductor merges."""
    return value.device.type != "cpu" and all(isinstance(stride, int) for stride in value.stride())
