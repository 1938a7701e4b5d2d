"""Writes in the forward of a captured autograd.Function, whose meaning older versions of Dynamo lose."""

import operator
import re
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxamp.capture.autograd_functions import marks_dirty
from fxamp.errors import CaptureError
from fxamp.graph import describe_source, returned, tensor_value
from fxamp.graph.aliases import AliasSets
from fxamp.graph.higher_order_ops import AutogradFunction


def require_separate_results(forward: GraphModule) -> None:
    """Raise CaptureError if ``forward``, of a Function, returns one tensor twice: torch would lose its gradient.

    Before torch 2.12 Dynamo also returns what each in-place call of a forward returns, which is the tensor itself.
    """
    results = [leaf for leaf in pytree.tree_leaves(returned(forward.graph)[0]) if isinstance(leaf, Node)]
    for result in results:
        target = _written(result)
        if target is not result and target in results:
            raise CaptureError(
                f"an autograd.Function writes to its result {target.name} in place, at {describe_source(result)}, and "
                "this version of torch.compile then loses its gradient under every backend; accepted: torch 2.12 or "
                "newer, a forward that computes its result out of place, or torch._dynamo.disable on its caller"
            )


def _written(node: Node) -> Node:
    """Return the value that ``node``, a chain of in-place methods, writes to and returns; else ``node`` itself."""
    while (
        node.op == "call_method" and re.fullmatch(r"\w*[a-z0-9]_", str(node.target)) and isinstance(node.args[0], Node)
    ):
        node = node.args[0]
    return node


def copy_marked_results(node: Node, function: AutogradFunction, forward: GraphModule) -> None:
    """Let the Function of ``node`` write to copies of its inputs, and copy each result that is an input back to it.

    ``forward`` is the traced forward, which is changed. ``ctx.mark_dirty`` makes the Function part of the input's
    history, so that readers of the input and of its views after the call have the Function in their gradients; copying
    the result does the same. Does nothing from torch 2.13 on, whose Dynamo stores the marks in the node, or if the
    Function marks nothing. Older versions drop the marks, and with them the gradients of such readers.
    """
    writes = _returned_writes(forward) if torch.__version__ < "2.13" else []
    if not writes or not marks_dirty(forward):
        return
    inputs = forward.graph.find_nodes(op="placeholder")
    for at, result in writes:
        with forward.graph.inserting_after(inputs[-1]):
            copy = forward.graph.call_function(torch.ops.aten.clone.default, (inputs[at],))
        copy.meta = dict(inputs[at].meta)
        inputs[at].replace_all_uses_with(copy, delete_user_cb=lambda user, own=copy: user is not own)
        _copy_to_input(node, function.forward.operands[at], result)
    forward.recompile()


def _returned_writes(forward: GraphModule) -> list[tuple[int, int]]:
    """Return which inputs ``forward`` writes to and returns, each with the index of the result that it is."""
    sets = AliasSets(forward.graph)
    results = pytree.tree_leaves(returned(forward.graph)[0])
    found = {}
    for at, node in enumerate(forward.graph.find_nodes(op="placeholder")):
        same = [index for index, leaf in enumerate(results) if _is_whole(leaf, node, sets)]
        if sets.mutated(node) and same:
            found[at] = same[0]
    return list(found.items())


def _is_whole(result: Any, node: Node, sets: AliasSets) -> bool:
    """Whether ``result`` is the tensor of ``node``, or a view of all of it."""
    a, b = tensor_value(result), tensor_value(node)
    if a is None or b is None or not sets.shared(result, node):
        return False
    return (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())


def _copy_to_input(node: Node, operand: Node, index: int) -> None:
    """Copy result ``index`` of ``node`` to ``operand``, which takes the place of that result."""
    picks = [user for user in node.users if user.target is operator.getitem and user.args[1] == index]
    with node.graph.inserting_after(node):
        result = node.graph.call_function(operator.getitem, (node, index))
    result.meta = {**node.meta, "val": node.meta["val"][index]}
    with node.graph.inserting_after(result):
        written = node.graph.call_function(torch.ops.aten.copy_.default, (operand, result))
    written.meta = {**result.meta, "val": operand.meta["val"]}
    for pick in picks:
        pick.replace_all_uses_with(written)
        node.graph.erase_node(pick)
