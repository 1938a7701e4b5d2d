"""A graph and the calls around it: what the inputs of a body are bound to, and which memory the program writes to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.fx import Graph, Node

from fxamp.graph.aliases import AliasSets
from fxamp.graph.higher_order_ops import Body
from fxamp.graph.nodes import nodes_with_gradients


@dataclass(frozen=True, eq=False)
class Scope:
    """A graph and, if it is the body of a call, the scope ``outer`` of the graph that has the call.

    ``gradients``: whether gradients are on at its start. ``bound``: what each input of a body is bound to.
    """

    graph: Graph
    gradients: bool = True
    outer: "Scope | None" = None
    bound: Mapping[Node, Any] = field(default_factory=dict)

    def inside(self, call: Node, body: Body) -> "Scope":
        """Return the scope of a body of ``call``, a node of this graph."""
        inputs = body.module.graph.find_nodes(op="placeholder")
        bound = dict(zip(inputs, body.operands, strict=True))
        return Scope(body.module.graph, self.has_gradients(call), self, bound)

    def has_gradients(self, node: Node) -> bool:
        """Whether gradients are on at ``node``."""
        return node in self._with_gradients

    def writes_to(self, value: Node) -> bool:
        """Whether anything may write to the memory of ``value``, here or in the graphs around."""
        if self._aliases.mutated(value):
            return True
        if self.outer is None:
            return False
        shared = self._aliases.of([value])
        operands = [operand for at, operand in self.bound.items() if at in shared and isinstance(operand, Node)]
        return any(map(self.outer.writes_to, operands))

    @cached_property
    def _aliases(self) -> AliasSets:
        return AliasSets(self.graph)

    @cached_property
    def _with_gradients(self) -> set[Node]:
        return nodes_with_gradients(self.graph, self.gradients)
