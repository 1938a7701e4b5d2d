"""realize-gradients: return the gradients of convolutions' weights in the layout that they have in eager mode.

Inductor lets convolutions work in channels_last, and their weights' gradients leave its kernels so. autograd wants a
gradient in its parameter's layout, and copies it (``AccumulateGrad``, "gradient layout contract"). A scaler checks the
copy again, because it is not what the graph returned.

1. Each gradient of four dimensions on a CPU, contiguous or in channels_last, is realized: the kernel that computes it
   writes it in its layout.

No value changes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxamp.graph import graph_output
from fxamp.passes.backward.scale_backward import gradients
from fxamp.passes.shared.realize import Realize, is_realized
from fxamp.torch_private import is_dynamic


@dataclass(frozen=True)
class RealizeGradients(Realize):
    """Requires AOTAutograd's backward, with descriptors; ensures rule 1."""

    name = "realize-gradients"

    def selected(self, gm: GraphModule) -> list[Node]:
        results: Any = graph_output(gm.graph).args[0]
        returned = dict.fromkeys(results[at] for at in gradients(gm))
        return [node for node in returned if _may_be_in_channels_last(node.meta["val"]) and not is_realized(node)]


def _may_be_in_channels_last(value: Tensor) -> bool:
    if value.layout is not torch.strided or is_dynamic(value) or value.dim() != 4 or value.device.type != "cpu":
        return False
    return value.is_contiguous() or value.is_contiguous(memory_format=torch.channels_last)
