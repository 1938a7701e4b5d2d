"""Whose gradients a running backward makes.

One compiled graph serves all modules of the same code and shapes, so the parameters that it was compiled with say
nothing. But autograd knows: the running node's next edges lead to where each gradient goes, a parameter's accumulator,
or an earlier node.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def running_node() -> Any:
    """The autograd node that is being run; None outside a backward."""
    return torch._C._current_autograd_node()


def owners(node: Any, outputs: int, positions: Sequence[int]) -> list[Tensor | None]:
    """The parameter that each of the node's gradients at ``positions`` of ``outputs`` belongs to.

    None for a gradient of anything else, and where the node's inputs are not the graph's one by one (tensor subclasses,
    which are taken apart).
    """
    needed = getattr(node, "needs_input_grad", None)
    if needed is None or len(needed) != outputs:
        return [None] * len(positions)
    edges = iter([function for function, _ in node.next_functions if function is not None])
    leaves = [getattr(next(edges), "variable", None) if need else None for need in needed]
    return [leaf if isinstance(leaf := leaves[at], nn.Parameter) else None for at in positions]
