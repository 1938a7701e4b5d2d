"""Find the parameters that a running backward computes gradients for.

One compiled graph serves all modules of the same code and shapes, so its compile-time parameters do not identify them.
The running autograd node does: its next edges lead to where each gradient goes, to a parameter's accumulator or to an
earlier node.
"""

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fxamp.torch_private import function_of, running_node, subclass_metadata


def owners(node: Any, outputs: int, positions: Sequence[int]) -> list[Tensor | None]:
    """Return the parameter of each of the node's gradients at ``positions`` among ``outputs`` outputs.

    In a graph, a wrapper such as DTensor appears as its inner tensors; their gradients belong to the wrapper. None for
    any other gradient, and if AOTAutograd does not tell which input an output is the gradient of.
    """
    ends = leaves(node, outputs)
    return [leaf if isinstance(leaf := ends[at], nn.Parameter) else None for at in positions]


def owner_references(outputs: int, positions: Sequence[int]) -> list["weakref.ref[Tensor] | None"]:
    """Return weak references to :func:`owners` of the running node."""
    return [None if owner is None else weakref.ref(owner) for owner in owners(running_node(), outputs, positions)]


def leaves(node: Any, outputs: int) -> list[Tensor | None]:
    """Return the leaf whose ``.grad`` each of the node's ``outputs`` gradients goes to; None as in :func:`owners`."""
    needed = getattr(node, "needs_input_grad", None)
    inputs = None if needed is None else _inputs_of_outputs(node, len(needed))
    if needed is None or inputs is None or len(inputs) != outputs:
        return [None] * outputs
    edges = node.next_functions
    ends = [getattr(function, "variable", None) for function, _ in edges]
    if len(edges) != len(needed):  # an input that is not a tensor has no edge
        accumulated = (end for end, (function, _) in zip(ends, edges, strict=True) if function is not None)
        ends = [next(accumulated) if need else None for need in needed]
    return ends if isinstance(inputs, range) else [ends[at] for at in inputs]


def _inputs_of_outputs(node: Any, inputs: int) -> Sequence[int] | None:
    """Return, for each output of the graph, the node's input that it is the gradient of; None if it is unknown.

    This reads private metadata of AOTAutograd. If another torch keeps it elsewhere, no wrapper's gradient has an owner,
    and its flags count for every optimizer.
    """
    wrapped = subclass_metadata(function_of(node))
    if wrapped is None:
        return range(inputs)
    counts = [getattr(meta, "arg_count", 1) for meta in wrapped.grad_input_metas or ()]
    if len(counts) != inputs:
        return None
    return [at for at, count in enumerate(counts) for _ in range(count)]
