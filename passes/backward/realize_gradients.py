"""realize-gradients: return the gradients of convolutions' weights in the layout that they have in eager mode.

Inductor lets convolutions work in channels_last, and their weights' gradients leave its kernels so. autograd wants a
gradient in its parameter's layout, and copies it (``AccumulateGrad``, "gradient layout contract"). A scaler checks the
copy again, because it is not what the graph returned.

1. Each gradient of four dimensions on a CPU is realized: the kernel that computes it writes it in its layout.

No value changes.
"""

from dataclasses import dataclass

import torch
from torch.fx import Node

from fxamp.graph import graph_output, tensor_value
from fxamp.passes.backward.scale_backward import gradients
from fxamp.passes.shared.realize import Realize, is_realized
from fxamp.torch_private import is_dynamic


@dataclass(frozen=True)
class RealizeGradients(Realize):
    """Requires AOTAutograd's backward, with descriptors; ensures rule 1."""

    name = "realize-gradients"

    def selects(self, node: Node) -> bool:
        value, output = tensor_value(node), graph_output(node.graph)
        if value is None or output not in node.users or value.dim() != 4 or value.device.type != "cpu":
            return False
        module, results = node.graph.owning_module, output.args[0]
        assert module is not None and isinstance(results, (list, tuple))
        fits = value.layout is torch.strided and not (is_dynamic(value) or is_realized(node))
        return fits and any(results[at] is node for at in gradients(module))
