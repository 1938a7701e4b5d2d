"""Which values of a step's graph are computed for each element, and which once for each parameter."""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten


def is_flat(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() > 0 and not is_numbers(node)


def is_numbers(node: Node) -> bool:
    """Whether the input is the vector of settings, whose items are read one by one."""
    return bool(node.users) and all(user.target is aten.select.int for user in node.users)


def counters(gm: GraphModule) -> list[Node]:
    """Return the final writes to 0-dim inputs, which are counters."""
    copies = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    return [node for node in copies if not is_flat(node)]


def prepared_nodes(gm: GraphModule) -> list[Node]:
    """Return the 0-dim values that elements read and that a kernel of their own computes first; none if none is needed.

    It is needed for counters, which must change only once, and for float64 arithmetic, for which GPUs have few units.
    """
    scalars = [node for node in gm.graph.nodes if node.op == "call_function" and not is_flat(node)]
    wide = [node for node in scalars if _is_wide(node) and node.target is not aten.select.int]
    if not wide and not counters(gm):
        return []
    skip = skipping(gm)
    inputs = [n for n in gm.graph.find_nodes(op="placeholder") if not is_flat(n) and not is_numbers(n)]
    return [n for n in (*inputs, *scalars) if n is skip or any(is_flat(user) for user in n.users)]


def _is_wide(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is torch.float64


def skipping(gm: GraphModule) -> Node | None:
    """Return the 0-dim condition under which the step changes no element; None if there is none."""
    copies = [node for node in gm.graph.find_nodes(op="call_function", target=aten.copy_.default) if is_flat(node)]
    conditions = set()
    for copy in copies:
        value = copy.args[1]
        if not isinstance(value, Node) or value.target is not aten.where.self or value.args[1] is not copy.args[0]:
            return None
        conditions.add(value.args[0])
    (condition,) = conditions if len(conditions) == 1 else (None,)
    return condition if isinstance(condition, Node) and not is_flat(condition) else None
