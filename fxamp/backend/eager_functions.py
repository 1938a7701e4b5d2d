"""autograd.Functions in a graph that runs eagerly: saved values have gradients in a second backward.

torch's op for a captured Function passes saved values from its forward to its backward without autograd, and Dynamo
captures the backward without gradients. That is enough for AOTAutograd and Inductor, which refuse a second backward.
Without them the op silently drops the gradient through the Function in a second backward, such as that of a gradient
penalty.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxamp.capture.autocast_state import regions_closed_on_error
from fxamp.errors import DoubleBackwardError
from fxamp.graph import SourceFrame, all_graphs, nesting_change, source_frames, subgraphs
from fxamp.graph.higher_order_ops import AutogradFunction, autograd_function
from fxamp.torch_private import untraced

#: Arguments of torch's op: which saved values the program gave to ``save_for_backward``; which results it marked. If
#: torch renames them, the op stays, and second derivatives are those that it gives.
_SAVED, _CONSTANT, _DIRTY = "saved_for_backward_idx", "non_differentiable_idx", "dirty_idx"

_SET_GRAD = torch._C._set_grad_enabled


def use_eager_functions(gm: GraphModule) -> None:
    """Replace each captured Function in ``gm`` and in its bodies by one that saves as an eager program does.

    Functions inside torch.func transforms stay as they are. Afterwards ``gm`` can run, but
    :func:`fxamp.graph.higher_order_ops.autograd_function` does not recognize these Functions.
    """
    for node in list(_outside_transforms(gm)):
        function = autograd_function(node) if _SAVED in node.kwargs else None
        if function is not None:
            function.backward.module.meta[_SECOND] = _second_backward(function)
            node.target = _apply
    for module in dict.fromkeys(all_graphs(gm)):
        module.recompile()


def _outside_transforms(gm: GraphModule) -> Iterator[Node]:
    """Yield the nodes of ``gm`` and its bodies outside torch.func transforms, which take no Function of this kind."""
    depth = 0
    for node in gm.graph.nodes:
        depth += nesting_change(node.target)
        if depth == 0:
            yield node
            for _, body in subgraphs(node):
                yield from _outside_transforms(body)


#: In ``meta`` of a Function's backward: the same with gradients; or why there is none, as text.
_SECOND = "fxamp_second_backward"

_UNKNOWN = (
    "a second backward through an autograd.Function whose backward turns gradients on or off more than once; "
    "accepted: torch.compiler.disable around the Function"
)
_HOOK = (
    "a second backward through a value with a hook on its gradient: the Dynamo of this torch turns the hook into an "
    "autograd.Function, whose second derivatives differ; accepted: torch 2.13 or newer, or torch._dynamo.graph_break() "
    "before the hook is registered"
)


def _second_backward(function: AutogradFunction) -> GraphModule | str:
    """Return the backward of ``function`` without the calls by which Dynamo turns gradients off around it.

    If it is marked ``once_differentiable``, return it as it is. Return a message if there is no such backward: the
    program turns gradients on or off in it more than once, and it is unknown which of the calls belong together; or it
    is the hook of a value, for which this torch's Dynamo has no op.
    """
    if _is_hook(function.forward.module):
        return _HOOK
    backward = function.backward.module
    if any(_is_once(frame) for node in backward.graph.nodes for frame in source_frames(node)):
        return backward
    copied = deepcopy(backward)
    calls = copied.graph.find_nodes(op="call_function", target=_SET_GRAD)
    if [call.args[0] for call in (*calls[:1], *calls[-1:])] != [False, True] or len(calls) not in (2, 4):
        return _UNKNOWN
    for call in (calls[0], calls[-1]):
        copied.graph.erase_node(call)
    for call in calls[2:-1]:
        call.args = (True,)
    copied.recompile()
    return copied


def _is_hook(forward: GraphModule) -> bool:
    """Whether Dynamo made the Function for ``register_hook``: it returns a view that no line of the program makes."""
    ops = [node for node in forward.graph.nodes if node.op == "call_function" and node.target is not _SET_GRAD]
    if [node.target for node in ops] != [torch.ops.aten.view_as.default]:
        return False
    return not any("view_as" in frame.text for frame in source_frames(ops[0]))


def _is_once(frame: SourceFrame) -> bool:
    return frame.function == "wrapper" and frame.file == torch.autograd.function.__file__


@dataclass(frozen=True)
class _Call:
    forward: GraphModule
    backward: GraphModule
    saved: frozenset[int]
    constant: frozenset[int]
    dirty: frozenset[int]


def _apply(forward: GraphModule, backward: GraphModule, *operands: Any, **options: Any) -> Any:
    indices = (frozenset(options.get(name, ())) for name in (_SAVED, _CONSTANT, _DIRTY))
    return _Captured.apply(_Call(forward, backward, *indices), *operands)  # type: ignore[no-untyped-call]


class _Captured(torch.autograd.Function):
    """A Function of two graphs. Tensors that the program stored as attributes are not checked for later writes."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *operands: Any) -> Any:
        results, saved = call.forward(*operands)
        leaves = pytree.tree_leaves(results)
        ctx.mark_dirty(*(leaves[index] for index in call.dirty))
        ctx.mark_non_differentiable(*(leaves[index] for index in call.constant))
        ctx.save_for_backward(*(value for index, value in enumerate(saved) if index in call.saved))
        ctx.attributes = {index: value for index, value in enumerate(saved) if index not in call.saved}
        ctx.call = call
        return results

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Any) -> Any:
        tensors = ctx.saved_tensors
        count, rest = len(ctx.attributes) + len(tensors), iter(tensors)
        values = [*gradients, *(ctx.attributes[at] if at in ctx.attributes else next(rest) for at in range(count))]
        again = torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)
        first, second = ctx.call.backward, ctx.call.backward.meta[_SECOND]
        if again and isinstance(second, str):
            raise DoubleBackwardError(second)
        if again and second is first:  # as in eager mode, it raises if its result is differentiated
            return once_differentiable(lambda *_: _run(first, values))(ctx, *gradients)
        return _run(second if again else first, values)


def _run(backward: GraphModule, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the gradients of the operands, after None for the call itself."""
    with regions_closed_on_error():
        gradients = backward(*values)
    return None, *pytree.tree_leaves(gradients, is_leaf=lambda value: value is None)
