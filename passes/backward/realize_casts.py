"""realize-casts: write a 16-bit copy of a gradient in the gradient's own shape, so that its kernel can write it too.

The backward casts the float32 gradient of a residual stream to 16 bits for products, which read it through a view:
``view(convert(gradient [16, 512, 768]), [8192, 768])``. On a GPU, Inductor makes one kernel of cast and view, in the
view's shape, and fuses only kernels whose loops have the same shape: the gradient is written, read and written again.

1. A cast from float32 to 16 bits with more than two dimensions and fixed strides is realized with its strides if only
   views of it are read, and its source has other readers. Its kernel then has the shape of its source, and fuses with
   the kernel that computes the source. A source without another reader is never written to memory: Inductor computes it
   where the cast is read, for example when it unpacks a saved value.

No value changes.
"""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from fxamp.graph import tensor_value
from fxamp.passes.shared.realize import RealizeStrides, can_be_realized
from fxamp.passes.shared.widening import CASTS
from fxamp.torch_dtypes import NARROW

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


@dataclass(frozen=True)
class RealizeCasts(RealizeStrides):
    """Requires AOTAutograd's backward; ensures rule 1 on every device but the CPU, whose loops Inductor merges."""

    name = "realize-casts"

    def selected(self, gm: GraphModule) -> list[Node]:
        return [node for node in gm.graph.nodes if _costs_a_copy(node)]


def _costs_a_copy(node: Node) -> bool:
    value = tensor_value(node)
    if node.target not in CASTS or value is None or not can_be_realized(value):
        return False
    source = node.args[0].meta["val"]  # type: ignore[union-attr]
    narrows = value.dtype in NARROW and source.dtype == torch.float32 and value.dim() > 2
    through_views = bool(node.users) and all(user.target in _VIEWS for user in node.users)
    return narrows and through_views and _is_written(node.args[0])


def _is_written(source: Argument) -> bool:
    """Whether a value has readers other than casts, so that its kernel writes it to memory."""
    return isinstance(source, Node) and any(user.target not in CASTS for user in source.users)
