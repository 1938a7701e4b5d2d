"""The nodes that scale-backward writes: products with the scale and its inverse, and the flags."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

import fxamp.kernels  # noqa: F401  registers fxamp::check_unscale
from fxamp.passes.widening import before_widening

aten = torch.ops.aten
prims = torch.ops.prims

NO_FLOAT64 = frozenset({"mps"})


class UnscaleWriter:
    """Writes into one backward graph; ``scale`` is its input that holds the scale, ``mode`` owns its values."""

    def __init__(self, gm: GraphModule, mode: FakeTensorMode, scale: Node) -> None:
        self._graph = gm.graph
        self._mode = mode
        self._scale = scale
        with self._graph.inserting_before(scale.next):
            self._inverse = self._reciprocal()

    def scale(self, tangent: Node) -> None:
        """Let all users of ``tangent`` read it times the scale, in its dtype."""
        users = list(tangent.users)
        with self._graph.inserting_before(_first_computation(self._graph)):
            scaled = self._product(tangent, self._scale)
        for user in users:
            user.replace_input_with(tangent, scaled)

    def unscale(self, gradients: Sequence[Node], kernel: bool) -> tuple[list[Node], Node]:
        """Return the true gradients, and their flags in one tensor: ``[len(gradients)]``."""
        distinct = list(dict.fromkeys(gradients))
        real = [node for node in distinct if not node.meta["val"].is_complex()]
        write = self._by_kernel if kernel else self._by_ops
        written = write(real) | self._by_ops([node for node in distinct if node not in real])
        flags = self._call(aten.cat.default, [written[node][1] for node in gradients])
        return [written[node][0] for node in gradients], flags

    def _by_ops(self, gradients: Sequence[Node]) -> dict[Node, tuple[Node, Node]]:
        return {node: self._checked(self._product(node, self._inverse)) for node in gradients}

    def _checked(self, true: Node) -> tuple[Node, Node]:
        """After the product, so that an inverse beyond float32 is found too. inf - inf and NaN - NaN are NaN."""
        difference = self._call(aten.sub.Tensor, true, true)
        found = self._call(aten.any.default, self._call(aten.ne.Scalar, difference, 0))
        return true, self._flags(found)

    def _by_kernel(self, gradients: Sequence[Node]) -> dict[Node, tuple[Node, Node]]:
        groups: dict[tuple[torch.device, torch.dtype], list[Node]] = {}
        for node in gradients:
            groups.setdefault((node.meta["val"].device, node.meta["val"].dtype), []).append(node)
        written: dict[Node, tuple[Node, Node]] = {}
        for (device, dtype), members in groups.items():
            sources = [before_widening(node, self._call) for node in members]
            inverse = self._on(self._inverse, device)
            results = self._call(torch.ops.fxamp.check_unscale.default, sources, inverse, dtype)
            true, flags = self._item(results, 0), self._item(results, 1)
            # The kernel looks at the gradients as they come: an inverse that is not finite spoils all of them.
            _, spoilt = self._checked(inverse)
            flags = self._call(aten.logical_or.default, flags, spoilt)
            for at, node in enumerate(members):
                written[node] = self._item(true, at), self._flags(self._call(aten.select.int, flags, 0, at))
        return written

    def _flags(self, found: Node) -> Node:
        """A 0-dim flag as a bool of one element on the scale's device."""
        return self._call(aten.view.default, self._on(found, self._scale.meta["val"].device), [1])

    def _product(self, node: Node, factor: Node) -> Node:
        """``node`` times a 0-dim float32, in float32 at least, in the dtype of ``node``."""
        value = node.meta["val"]
        factor = self._on(factor, value.device)
        wide = torch.promote_types(value.dtype, torch.float32)
        product = self._call(aten.mul.Tensor, self._as(node, wide), factor)
        return self._as(product, value.dtype)

    def _reciprocal(self) -> Node:
        """Rule 3."""
        if self._scale.meta["val"].device.type in NO_FLOAT64:
            return self._call(aten.reciprocal.default, self._scale)
        exact = self._call(aten.reciprocal.default, self._as(self._scale, torch.float64))
        return self._as(exact, torch.float32)

    def _as(self, node: Node, dtype: torch.dtype) -> Node:
        if node.meta["val"].dtype == dtype:
            return node
        return self._call(prims.convert_element_type.default, node, dtype)

    def _on(self, node: Node, device: torch.device) -> Node:
        if node.meta["val"].device == device:
            return node
        return self._call(prims.device_put.default, node, device)

    def _item(self, node: Node, at: int) -> Node:
        item = self._graph.call_function(operator.getitem, (node, at))
        item.meta["val"] = node.meta["val"][at]
        return item

    def _call(self, op: OpOverload | Callable[..., Any], *args: Any) -> Node:
        node = self._graph.call_function(op, args)
        with self._mode:
            node.meta["val"] = op(*map_arg(args, lambda given: given.meta["val"]))
        return node


def _first_computation(graph: Graph) -> Node:
    found: Node = next(node for node in graph.nodes if node.op != "placeholder")
    return found
