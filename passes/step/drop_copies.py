"""drop-copies: remove copies in a functional graph, where no op writes to them.

1. ``clone(x)`` becomes ``x`` if it has the strides of ``x``.
2. ``copy(kept, new)``, the functional form of ``copy_``, becomes ``new`` if both have the same dtype, shape and
   strides.

A copy of an input stays if the step writes to that input, and writes the copy to another one, in whatever order: the
step would read the new value.

Traces of optimizers contain many of both. Inductor would create a buffer for each copy of an input that the step writes
to at the end, and try to fuse it with other kernels, which would take most of the compile time of a step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxamp.graph import tensor_value
from fxamp.graph.aliases import aliased_inputs, memory_readers
from fxamp.passes.base import Context, Pass, Result, broken_by

aten = torch.ops.aten

#: Ops that copy, and the position of the argument that they copy.
COPIES: dict[Any, int] = {aten.clone.default: 0, aten.copy.default: 1}


@dataclass(frozen=True)
class DropCopies(Pass[Context]):
    """Requires a functional graph, whose only writes are final ``copy_`` to inputs; ensures that no rule applies."""

    name = "drop-copies"

    def run(self, gm: GraphModule, context: Context) -> Result:
        dropped = 0
        for node in list(gm.graph.nodes):
            source = _copied(node)
            if source is not None:
                node.replace_all_uses_with(source)
                gm.graph.erase_node(node)
                dropped += 1
        return Result(dropped)

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        return broken_by("copies are left", (node for node in gm.graph.nodes if _copied(node) is not None))


def _copied(node: Node) -> Node | None:
    """Return the value that the node copies; None if it copies none, or if the copy must stay."""
    if node.target not in COPIES:
        return None
    source = node.args[COPIES[node.target]]
    if not isinstance(source, Node):
        return None
    value, original = tensor_value(node), tensor_value(source)
    if value is None or original is None:
        return None
    same = (value.dtype, value.shape, value.stride()) == (original.dtype, original.shape, original.stride())
    return source if same and not _keeps_old_value(node, source) else None


def _keeps_old_value(node: Node, source: Node) -> bool:
    """Whether the step writes to the input that ``source`` is or views, and writes its copy ``node`` to another one."""
    while sources := aliased_inputs(source):
        source = sources[0]
    targets = {user.args[0] for user in memory_readers(node) if user.target is aten.copy_.default} - {source}
    return bool(targets) and any(user.target is aten.copy_.default and user.args[0] is source for user in source.users)
