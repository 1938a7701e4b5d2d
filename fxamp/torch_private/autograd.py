"""The autograd graph: its nodes, and the backward that is running."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

Node = Any
"""A node of the autograd graph; torch's own class for nodes does not cover C++ nodes."""


def grad_fn(value: torch.Tensor) -> Node:
    """Return the node of ``value``; None if it has none, as a view that was made under ``no_grad``.

    torch raises an error if such a view is asked for its node after its base was written to. Any other view gets a new
    node if it is asked then, which changes the order in which gradients are summed. So for a view of written memory,
    this returns the node of its base. Breaks loudly.
    """
    meta = torch._C._autograd.CreationMeta
    if not value.requires_grad or not value._is_view():
        return value.grad_fn
    if torch._C._autograd._get_creation_meta(value) == meta.NO_GRAD_MODE:
        return None
    return value._base.grad_fn if value._version else value.grad_fn  # type: ignore[union-attr]


def running_node() -> Node:
    """Return the autograd node that is running in this thread; None outside a backward. Breaks loudly."""
    return torch._C._current_autograd_node()


def running_backward() -> int:
    """Return the number of the backward that is running in this thread; -1 outside a backward.

    Breaks loudly. If torch does not count up by one, every custom Function is rejected as one that runs
    another backward.
    """
    return torch._C._current_graph_task_id()


def after_backward(call: Callable[[], None]) -> None:
    """Call ``call`` when the backward that is running in this thread has ended. Breaks loudly."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def keeps_graph() -> bool:
    """Whether the running backward keeps its graph (``retain_graph``, ``create_graph``). Breaks loudly."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


_Accumulation = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def is_leaf(node: Node) -> bool:
    """Whether ``node`` accumulates into the ``.grad`` of a tensor. Breaks loudly."""
    return isinstance(node, _Accumulation)


def inner_nodes(edges: Sequence[tuple[Node, int]]) -> list[Node]:
    """Return the nodes of a node's ``next_functions`` that are not leaves. Breaks loudly."""
    return [node for node, _ in edges if node is not None and not isinstance(node, _Accumulation)]


def accumulates(parameter: torch.Tensor) -> bool:
    """Whether the backward that is running adds to the ``.grad`` of the leaf ``parameter``; autograd.grad() does not.

    Breaks loudly.
    """
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError as error:
        if "autograd.grad" not in str(error):
            raise
        return False


def gradient_dtypes(node: Node) -> list[torch.dtype]:
    """Return the dtypes of the gradients that enter ``node``. Breaks loudly."""
    return [entry.dtype for entry in node._input_metadata]


def made_before(node: Node) -> int:
    """Return how many nodes its thread had created before ``node``. Breaks loudly."""
    number: int = node._sequence_nr()
    return number


def function_of(node: Node) -> Any:
    """Return the ``torch.autograd.Function`` whose backward ``node`` runs; None for an operator of torch.

    If torch renames ``_forward_cls``, fxamp recognises none of its own nodes: their backwards raise if a hook was set
    on them, and no gradient has a known owner such as a DTensor.
    """
    return getattr(type(node), "_forward_cls", None)


def autocast_dtype_of(node: Node) -> torch.dtype | None:
    """Return the dtype of the autocast under which a Function's ``node`` ran its forward (``custom_fwd``), or None.

    If torch renames the attributes, a Function that computes in float16 between wider gradients is not scaled.
    """
    return getattr(node, "_dtype", None) if getattr(node, "_fwd_used_autocast", False) else None


def inlines_saved_tensors_hooks() -> bool:
    """Whether AOTAutograd puts the program's ``saved_tensors_hooks``, which are graphs, into what it compiles now.

    Breaks loudly.
    """
    from torch._functorch._aot_autograd import utils

    return bool(utils.saved_tensors_hooks_are_inlineable(utils.top_saved_tensors_hooks()))


def without_saved_tensors_hooks() -> AbstractContextManager[None]:
    """Hide tensors saved inside from the program's ``torch.autograd.graph.saved_tensors_hooks``. Breaks loudly."""
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing

    context: AbstractContextManager[None] = _disable_saved_tensors_hooks_during_tracing()
    return context


@contextmanager
def calling_saved_tensors_hooks() -> Iterator[None]:
    """Call saved-tensor hooks inside while a graph is traced, where torch leaves them out. Breaks loudly."""
    traced = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(traced)
