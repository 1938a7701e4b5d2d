"""Whose gradients a running backward makes.

One compiled graph serves all modules of the same code and shapes, so the parameters that it was compiled with say
nothing. But autograd knows: the running node's next edges lead to where each gradient goes, a parameter's accumulator,
or an earlier node.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fxamp.torch_private import function_of, subclass_metadata


def owners(node: Any, outputs: int, positions: Sequence[int]) -> list[Tensor | None]:
    """The parameter that each of the node's gradients at ``positions`` of ``outputs`` belongs to.

    A graph knows a wrapper such as DTensor by the tensors inside; each of their gradients belongs to the wrapper. None
    for a gradient of anything else, and where it cannot be told which of the node's inputs the outputs are of.
    """
    ends = leaves(node, outputs)
    return [leaf if isinstance(leaf := ends[at], nn.Parameter) else None for at in positions]


def leaves(node: Any, outputs: int) -> list[Tensor | None]:
    """The leaf in whose ``.grad`` each of the node's ``outputs`` gradients ends; None as :func:`owners`."""
    needed = getattr(node, "needs_input_grad", None)
    inputs = None if needed is None else _inputs_of_outputs(node, len(needed))
    if needed is None or inputs is None or len(inputs) != outputs:
        return [None] * outputs
    edges = iter([function for function, _ in node.next_functions if function is not None])
    ends = [getattr(next(edges), "variable", None) if need else None for need in needed]
    return [ends[at] for at in inputs]


def _inputs_of_outputs(node: Any, inputs: int) -> list[int] | None:
    """For each output of the graph the node's input that it is a gradient of; None if AOTAutograd does not tell.

    AOTAutograd's notes are private: where a torch keeps them elsewhere, no gradient of a wrapper has an owner, and its
    flags count for every optimizer.
    """
    wrapped = subclass_metadata(function_of(node))
    if wrapped is None:
        return list(range(inputs))
    counts = [getattr(meta, "arg_count", 1) for meta in wrapped.grad_input_metas or ()]
    if len(counts) != inputs:
        return None
    return [at for at, count in enumerate(counts) for _ in range(count)]
