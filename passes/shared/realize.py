"""Mark a value of AOTAutograd's graphs as one that Inductor writes to memory in the shape that it has.

Inductor's own primitive marks the place; in other compilers it does nothing.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.fx import Node

from fxamp.graph import GraphWriter


def realize(node: Node, readers: Sequence[Node], writer: GraphWriter) -> Node:
    """Let ``readers`` read what is written of ``node``; returns the mark."""
    from torch._inductor.inductor_prims import force_stride_order

    with writer.graph.inserting_after(node):
        realized = writer.call(force_stride_order, node, list(node.meta["val"].stride()))
    for reader in readers:
        reader.replace_input_with(node, realized)
    return realized


def can_be_realized(value: Tensor) -> bool:
    """Whether ``value`` has fixed strides and a device other than the CPU, whose loops Inductor merges."""
    return value.device.type != "cpu" and all(isinstance(stride, int) for stride in value.stride())
