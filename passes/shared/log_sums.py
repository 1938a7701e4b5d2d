"""The log-sums of a loss's logits, ``logsumexp`` over the classes, which a z-loss squares.

A chunked loss returns them, one number for each row. The program's use of them, such as a mean of squares times a
coefficient, stays as it is written.
"""

from collections.abc import Iterable

import torch
from torch.fx import Node

from fxamp.graph import INSERTED, AliasSets, argument, is_pure, tensor_value
from fxamp.graph.depth_first import depth_first
from fxamp.passes.shared.cast_writer import CONVERSIONS, COPIES

aten = torch.ops.aten


def log_sums_of(reader: Node, classes: int) -> tuple[Node, ...] | None:
    """Return ``reader`` if it is a ``logsumexp`` over dimension ``classes``, or those that read this conversion.

    None if anything else reads it.
    """
    if reader.target is aten.logsumexp.default:
        value = tensor_value(reader.args[0])
        dims = argument(reader, "dim")
        over = {dims} if isinstance(dims, int) else {*dims}
        return (reader,) if value is not None and {dim % value.dim() for dim in over} == {classes} else None
    if not (reader.target in COPIES or (reader.target in CONVERSIONS and keeps_values(reader))) or not reader.users:
        return None
    branches = [log_sums_of(user, classes) for user in reader.users]
    return None if None in branches else tuple(node for branch in branches for node in branch or ())


def keeps_values(node: Node) -> bool:
    """Whether a conversion is fxamp's, or loses nothing, stays on its device, and makes no dtype wider than float32."""
    source, result = tensor_value(node.args[0]), tensor_value(node)
    if INSERTED in node.meta:
        return True
    if source is None or result is None or source.device != result.device or source.layout != result.layout:
        return False
    return result.dtype is torch.float32 or (result.dtype is source.dtype and result.dtype is not torch.float64)


def moved_before(first: Node, loss: Node, operands: Iterable[Node]) -> tuple[Node, ...] | str:
    """Return the nodes to move before ``first`` so that ``operands`` exist there, in order; or, as text, why not.

    ``first`` is a log-sum before the ``loss``.
    """
    between = _nodes_between(first, loss)
    if any(node.target is torch._C._set_grad_enabled for node in between):
        return "gradients are switched on or off between it and the logsumexp of its logits"

    def inside(nodes: Iterable[Node]) -> list[Node]:
        return [node for node in nodes if node in between]

    needed = {*depth_first(inside(operands), lambda node: inside(node.all_input_nodes))}
    aliases = AliasSets(loss.graph) if needed else None
    fixed = [node for node in needed if node is first or not is_pure(node) or (aliases and aliases.mutated(node))]
    if fixed:
        return f"the logsumexp of its logits is before {fixed[0].name}, which it reads"
    return tuple(node for node in between if node in needed)


def _nodes_between(first: Node, end: Node) -> dict[Node, None]:
    """The nodes from ``first`` to before ``end``."""
    nodes, node = dict[Node, None](), first
    while node is not end:
        nodes[node] = None
        node = node.next
    return nodes
