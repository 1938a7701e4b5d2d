"""Inputs of a body that are a whole size: ``x.shape``, which Dynamo passes as one value if a dimension is dynamic.

make_fx traces with one placeholder for each number of a size, but a body has one input for each operand of its call.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fxamp.capture.autocast_state import AUTOCAST, autocast_states
from fxamp.graph import first_computation


def by_input(placeholders: Sequence[Node], inputs: Sequence[Any]) -> Iterator[list[Node]]:
    """Yield the ``placeholders`` of each of the ``inputs``: one, or one for each number of a size."""
    left = iter(placeholders)
    for value in inputs:
        yield [next(left) for _ in pytree.tree_leaves(value)]


def join_sizes(graph: Graph, inputs: Sequence[Any]) -> None:
    """Replace the placeholders of each size among ``inputs`` by one, from which the graph takes the numbers."""
    start = first_computation(graph)
    for numbers, value in zip(list(by_input(graph.find_nodes(op="placeholder"), inputs)), inputs, strict=True):
        if not isinstance(value, tuple):
            continue
        with graph.inserting_before(numbers[0] if numbers else start):
            size = graph.placeholder("size")
        size.meta["val"] = value
        for at, number in enumerate(numbers):
            with graph.inserting_before(start):
                taken = graph.call_function(operator.getitem, (size, at))
            taken.meta.update({AUTOCAST: autocast_states(), "val": value[at]})
            number.replace_all_uses_with(taken)
            graph.erase_node(number)
            if not taken.users:
                graph.erase_node(taken)
