"""Explain that a compiled backward cannot be differentiated, and which lowering can, when a program tries it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxamp.errors import DoubleBackwardError
from fxamp.kernels.nondifferentiable import nondifferentiable
from fxamp.torch_private import keeps_graph, running_node, untraced

_MESSAGE = (
    "the gradients of a graph compiled by AOTAutograd cannot be differentiated again (backward with create_graph=True, "
    "as in a gradient penalty). options={'lowering': 'eager'} supports it, with the same casts and the same scaling."
)


def explain_double_backward() -> None:
    """If the running node runs with create_graph, make its gradients raise an explanation if differentiated."""
    node = running_node() if keeps_graph() else None
    if node is None:
        return

    @untraced
    def refuse(gradients: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...] | None:
        # The next run of this node registers its own hook.
        handle.remove()
        if not torch.is_grad_enabled():
            return None
        return tuple(_final(g) for g in gradients)

    handle = node.register_hook(refuse)


def _final(gradient: Tensor | None) -> Tensor | None:
    if gradient is None or not gradient.requires_grad:
        return gradient
    return nondifferentiable(gradient, DoubleBackwardError(_MESSAGE))
