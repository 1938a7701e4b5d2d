"""Insert calls into a graph, each with its value, its location in the user's program, and the reason for it."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node, map_arg

from fxamp.graph.nodes import inherit_provenance
from fxamp.torch_private import rebind_sizes, without_autocast

#: Key of ``node.meta``: why fxamp inserted the node. Nodes of the program lack it.
INSERTED = "fxamp_inserted"

_prims = torch.ops.prims


class GraphWriter:
    """Inserts calls into ``graph`` at its insert point; ``mode`` owns the values of its nodes."""

    def __init__(self, graph: Graph, mode: FakeTensorMode) -> None:
        self.graph = graph
        self._mode = mode

    def call(
        self, op: Callable[..., Any], *args: Any, near: Node | None = None, why: str = "", name: str = "", **kwargs: Any
    ) -> Node:
        """Return a new call of ``op``, with the location of the node ``near`` and the reason ``why``."""
        node = self.graph.create_node("call_function", op, args, kwargs, name=name or None)
        return self._written(node, near, why)

    def copy(self, node: Node, replaced: Mapping[Node, Node]) -> Node:
        """Return a copy of the call ``node`` that reads other nodes; it keeps the location in the user's program."""
        copy = self.graph.node_copy(node, lambda source: replaced.get(source, source))
        return self._written(copy, None, "")

    def item(self, node: Node, index: int) -> Node:
        """Return one of the results of ``node``."""
        return self.call(operator.getitem, node, index)

    def in_dtype(self, node: Node, dtype: torch.dtype) -> Node:
        """Return ``node`` converted to ``dtype``; ``node`` itself if it has that dtype."""
        if node.meta["val"].dtype == dtype:
            return node
        return self.call(_prims.convert_element_type.default, node, dtype)

    def on_device(self, node: Node, device: torch.device) -> Node:
        """Return ``node`` copied to ``device``; ``node`` itself if it is there."""
        if node.meta["val"].device == device:
            return node
        return self.call(_prims.device_put.default, node, device)

    def times(self, node: Node, factor: Node) -> Node:
        """Return ``node`` times a 0-dim float32, computed in float32 or wider and rounded to the dtype of ``node``."""
        value = node.meta["val"]
        factor = self.on_device(factor, value.device)
        wide = self.in_dtype(node, torch.promote_types(value.dtype, torch.float32))
        return self.in_dtype(self.call(torch.ops.aten.mul.Tensor, wide, factor), value.dtype)

    def input(
        self,
        name: str,
        *size: int,
        dtype: torch.dtype,
        device: torch.device,
        before: Node | None = None,
        after: Node | None = None,
    ) -> Node:
        """Return a new tensor input of the graph, the last one, or ``before`` or ``after`` another one."""
        inputs = self.graph.find_nodes(op="placeholder")
        if before is None and inputs:
            place = self.graph.inserting_after(after or inputs[-1])
        else:
            place = self.graph.inserting_before(before or next(iter(self.graph.nodes), None))
        with place:
            node = self.graph.placeholder(name)
        with self._mode:
            node.meta["val"] = torch.empty(size, dtype=dtype, device=device)
        return node

    def _written(self, node: Node, near: Node | None, why: str) -> Node:
        if near is not None:
            inherit_provenance(node, near)
        if why:
            node.meta[INSERTED] = why
        with torch.no_grad(), without_autocast(), self._mode:
            node.meta["val"] = computed(node)
        return node


def computed(node: Node) -> Any:
    """Return the result of a function or method call on its inputs' values, whose fake mode must be active."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    call: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
    result = call(*(args[1:] if node.op == "call_method" else args), **kwargs)
    rebind_sizes(node, result)
    return result


def recompute(node: Node) -> str | None:
    """Recompute the value of ``node``; if the op raises, keep the old value and return the op's reason."""
    try:
        node.meta["val"] = computed(node)
    except Exception as error:
        return f"the op rejects: {(str(error) or type(error).__name__).splitlines()[0]}"
    return None
