"""realize-sums: write a long sum of gradients to memory once, instead of adding it up in every kernel that reads it.

In BERT, where attention follows a norm, four gradients are added: that of the residual stream, and those through
queries, keys and values. The norm's backward reads their sum in several kernels. Inductor writes a value with several
readers to memory only if computing it takes more than four reads. This sum takes four, so some kernels read all four
again: 3 % of a layer's bytes.

1. A large float32 sum that several ops read, of at least three additions that nothing else reads, is realized.

No value changes.
"""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from fxamp.graph import tensor_value
from fxamp.graph.depth_first import depth_first
from fxamp.passes.shared.realize import RealizeStrides, can_be_realized

_ADD = torch.ops.aten.add.Tensor

#: The minimum number of additions. With two, counting found no kernel that reads more than it must.
_LEAST = 3

#: The minimum number of elements. Below it, Inductor makes no kernel that sums over rows and over columns
#: (``MixOrderReduction`` in torch/_inductor/scheduler.py), and adding again costs less than writing.
_LARGE = 5 * 2**20


@dataclass(frozen=True)
class RealizeSums(RealizeStrides):
    """Requires AOTAutograd's backward; ensures rule 1 on every device but the CPU, whose loops Inductor merges."""

    name = "realize-sums"

    def selected(self, gm: GraphModule) -> list[Node]:
        return [node for node in gm.graph.nodes if _is_large_sum(node)]


def _is_large_sum(node: Node) -> bool:
    value = tensor_value(node)
    if node.target is not _ADD or value is None or value.dtype != torch.float32:
        return False
    many = len(node.users) > 1 and _additions(node) >= _LEAST
    return many and can_be_realized(value) and isinstance(value.numel(), int) and value.numel() >= _LARGE


def _additions(node: Node) -> int:
    """Count the additions that lead to the sum ``node``, itself included; others only if nothing else reads them."""

    def added(addition: Node) -> list[Node]:
        return [arg for arg in addition.all_input_nodes if arg.target is _ADD and len(arg.users) == 1]

    return len([*depth_first([node], added)])
