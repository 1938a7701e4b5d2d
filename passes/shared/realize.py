"""The base of passes that make Inductor write values to memory before their readers read them.

They insert an op that changes no value, but which Inductor does not see through.
"""

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter
from fxamp.passes.base import Context, Pass, Result, TracedPass, broken_by


@dataclass(frozen=True)
class Realize(Pass[Context]):
    """Realizes the nodes that a subclass selects; their readers read the written value. Ensures that none is left."""

    @abstractmethod
    def selected(self, gm: GraphModule) -> list[Node]:
        """Return the nodes to realize, each once, without those that have been realized."""

    @abstractmethod
    def realized(self, writer: GraphWriter, node: Node) -> Node:
        """Write the ops that realize ``node``; return the last one."""

    def reads_realized(self, reader: Node) -> bool:
        """Whether ``reader``, an op that reads a selected node, is to read the written value."""
        return True

    def run(self, gm: GraphModule, context: Context) -> Result:
        nodes = self.selected(gm)
        writer = GraphWriter(gm.graph, context.mode)
        for node in nodes:
            readers = list(filter(self.reads_realized, node.users))
            with gm.graph.inserting_before(node.next):
                realized = self.realized(writer, node)
            for reader in readers:
                reader.replace_input_with(node, realized)
        return Result(len(nodes))

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        return broken_by("not realized", self.selected(gm))


@dataclass(frozen=True)
class RealizeStrides(Realize, TracedPass[Context]):
    """Realizes values of AOTAutograd's graphs in their own shape.

    It inserts Inductor's own primitive, which does nothing in other compilers.
    """

    def realized(self, writer: GraphWriter, node: Node) -> Node:
        from fxamp.torch_private.parts.inductor import inductor_prims

        return writer.call(inductor_prims.force_stride_order, node, list(node.meta["val"].stride()))


def is_realized(node: Node) -> bool:
    """Whether ``node`` is what :class:`RealizeStrides` realized a value as."""
    return isinstance(node.target, OpOverload) and node.target._schema.name == "prims::inductor_force_stride_order"


def can_be_realized(value: Tensor) -> bool:
    """Whether ``value`` has fixed strides and a device other than the CPU, whose loops Inductor merges."""
    return value.device.type != "cpu" and all(isinstance(stride, int) for stride in value.stride())
