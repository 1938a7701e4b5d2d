"""The gradients of a value that several ops read, added in another order: autograd adds them as it visits the ops."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

#: How many orders of sums are tried.
ORDERS = 16


@contextmanager
def random_order(seed: int) -> Iterator[None]:
    """Let autograd visit nodes in a random order among those that the graph allows, which ``seed`` tells."""
    run, random = torch.autograd._engine_run_backward, Random(seed)

    def shuffled(outputs: Sequence[Tensor], *args: Any, **options: Any) -> Any:
        nodes = _nodes(outputs)
        for node, number in zip(nodes, random.sample(range(len(nodes)), len(nodes)), strict=True):
            node._set_sequence_nr(number)
        return run(outputs, *args, **options)

    with patch.object(torch.autograd, "_engine_run_backward", shuffled):
        yield


def _nodes(outputs: Sequence[Tensor]) -> list[Any]:
    """The nodes of a graph but those that add to ``.grad``."""
    nodes: dict[Any, None] = {}
    waiting: list[Any] = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes and node.name() != "torch::autograd::AccumulateGrad":
            nodes[node] = None
            waiting += [following for following, _ in node.next_functions]
    return list(nodes)
