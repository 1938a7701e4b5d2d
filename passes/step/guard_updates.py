"""guard-updates: make every update of an optimizer's step depend on a flag on the device.

1. The graph gets a new last input: the flag, 0-dim float32, nonzero to skip.
2. Every final mutation ``copy_(kept, new)`` of an input becomes ``copy_(kept, where(flag != 0, kept, new))``, with
   ``new`` in the dtype of ``kept``, because ``where`` would promote but ``copy_`` converts. It selects and does not
   multiply: ``inf * 0`` is NaN, so a product would let an overflow reach the parameters.

The step has already read the kept value, so after fusion the selection causes no extra memory traffic.
"""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter, is_mutable, tensor_value
from fxamp.passes.base import Context, Pass, Result, broken_by

aten = torch.ops.aten

#: Name of the new input.
FLAG = "found_inf"

#: Key of ``node.meta``, set on the selections that this pass inserted.
GUARD = "fxamp_guard"


@dataclass(frozen=True)
class GuardUpdates(Pass[Context]):
    """Requires a functional graph, whose only writes are final ``copy_`` to inputs; ensures rule 2 for each of them."""

    name = "guard-updates"

    def requires(self, gm: GraphModule, context: Context) -> str | None:
        devices = {str(value.device) for node in updates(gm) if (value := tensor_value(node.args[0])) is not None}
        if len(devices) > 1:
            return f"the tensors that it updates are on several devices: {', '.join(sorted(devices))}"
        for node in gm.graph.nodes:
            if _writes_elsewhere(node):
                return f"{node.name} writes to a tensor that is not an input: the graph is not functional"
        return None

    def run(self, gm: GraphModule, context: Context) -> Result:
        unguarded = [node for node in updates(gm) if not _guarded(node)]
        if not unguarded:
            return Result(0)
        writer = GraphWriter(gm.graph, context.mode)
        skip = _skip(writer, unguarded[0].args[0])
        for node in unguarded:
            target, new = node.args[:2]
            assert isinstance(target, Node) and isinstance(new, Node)
            with gm.graph.inserting_before(node):
                selected = writer.call(aten.where.self, skip, target, writer.in_dtype(new, target.meta["val"].dtype))
            selected.meta[GUARD] = True
            node.args = (target, selected)
        return Result(len(unguarded))

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        return broken_by("not guarded", (node for node in updates(gm) if not _guarded(node)))


def updates(gm: GraphModule) -> list[Node]:
    """Return the final mutations: copies to inputs of the graph."""
    copies = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    return [node for node in copies if isinstance(node.args[0], Node) and node.args[0].op == "placeholder"]


def _guarded(node: Node) -> bool:
    new = node.args[1]
    return isinstance(new, Node) and GUARD in new.meta


def _writes_elsewhere(node: Node) -> bool:
    if not is_mutable(node):
        return False
    target = node.args[0] if node.args else None
    return not (isinstance(target, Node) and target.op == "placeholder" and node.target is aten.copy_.default)


def _skip(writer: GraphWriter, target: object) -> Node:
    """Rule 1; the flag is on the device of the updates. Return the node of ``flag != 0``."""
    assert isinstance(target, Node)
    flag = writer.input(FLAG, dtype=torch.float32, device=target.meta["val"].device)
    with writer.graph.inserting_before(flag.next):
        return writer.call(aten.ne.Scalar, flag, 0)
