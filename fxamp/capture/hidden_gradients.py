"""Detect calls whose gradient is not that of the ops that they run.

Dynamo leaves some calls whole: a function under ``allow_in_graph`` or ``nonstrict_trace``, and an op that the class of
a tensor overrides by ``__torch_function__``. Inside may be an autograd.Function, or a hook on a gradient. A trace of
the ops lacks both, and its gradients would be silently wrong.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from fxamp.errors import CaptureError
from fxamp.torch_private.autograd import Node, grad_fn


class GradientNodes:
    """The nodes of autograd's graph that a call computes its results from."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        self._inputs = list(inputs)
        self._before = _nodes(self._inputs)

    def require_derived(self, result: object) -> None:
        """Raise CaptureError if an autograd.Function computed ``result``, or an input that the call wrote to."""
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        seen, waiting = set(self._before), list(_nodes([*results, *self._inputs]))
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if isinstance(node, BackwardCFunction):
                raise CaptureError(f"a trace of its ops would lose the gradient that {type(node).__name__} computes")
            waiting += [following for following, _ in node.next_functions if following is not None]


@contextmanager
def without_hooks() -> Iterator[None]:
    """Raise CaptureError after a block that registers hooks, on gradients for example."""
    before = RemovableHandle.next_id
    yield
    if RemovableHandle.next_id != before:
        raise CaptureError("a trace of its ops would lose the hooks that it registers")


def _nodes(tensors: Iterable[Tensor]) -> set[Node]:
    with torch._C.DisableTorchFunction():  # the modes that trace would look at each attribute that is read
        return {node for node in map(grad_fn, tensors) if node is not None}
