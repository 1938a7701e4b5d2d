"""realize-gradients: return the gradients of convolutions' weights in the layout that they have in eager mode.

Inductor lets convolutions work in channels_last, and their weights' gradients leave its kernels in that layout.
autograd needs a gradient in its parameter's layout, and copies it (``AccumulateGrad``, "gradient layout contract"). A
scaler checks the copy again, because it is not what the graph returned.

1. Each gradient of four dimensions, contiguous or in channels_last, is realized: the kernel that computes it writes it
   in its layout. If a kernel of fxamp unscales it, what that kernel reads is realized instead: it has 16 bits, and the
   kernel keeps its layout.

No value changes.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxamp.graph import returned
from fxamp.passes.backward.scale_backward import gradients
from fxamp.passes.shared.realize import RealizeStrides, is_realized
from fxamp.torch_private import is_dynamic


@dataclass(frozen=True)
class RealizeGradients(RealizeStrides):
    """Requires AOTAutograd's backward, with descriptors; ensures rule 1."""

    name = "realize-gradients"

    def selected(self, gm: GraphModule) -> list[Node]:
        results = returned(gm.graph)
        read = dict.fromkeys(_before_unscaling(results[at]) for at in gradients(gm))
        return [node for node in read if _may_be_in_channels_last(node.meta["val"]) and not is_realized(node)]


def _before_unscaling(gradient: Node) -> Node:
    """Return what fxamp's kernel reads to compute ``gradient``, or ``gradient`` itself if no kernel unscales it."""
    if gradient.target is not operator.getitem:
        return gradient
    unscaled, at = gradient.args
    if not isinstance(unscaled, Node) or unscaled.target is not operator.getitem:
        return gradient
    kernel: Any = unscaled.args[0]
    if kernel.target not in (torch.ops.fxamp.check_unscale.default, torch.ops.fxamp.check_unscale_norm.default):
        return gradient
    source: Node = kernel.args[0][at]
    return source


def _may_be_in_channels_last(value: Tensor) -> bool:
    if value.layout is not torch.strided or is_dynamic(value) or value.dim() != 4:
        return False
    return value.is_contiguous() or value.is_contiguous(memory_format=torch.channels_last)
