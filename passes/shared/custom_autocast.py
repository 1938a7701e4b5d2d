"""Write the requests of ``custom_fwd`` and ``custom_bwd`` into graphs that were captured without autocast."""

import torch
from torch.fx import GraphModule, Node

from fxamp.capture import inlined_call
from fxamp.graph import ENTER_AUTOCAST, GraphWriter
from fxamp.passes.base import CastContext
from fxamp.passes.shared.autocast_regions import erase_region
from fxamp.passes.shared.decision import Decision, decide

_WHY = "custom_fwd(cast_inputs=...) casts the inputs"

#: Key of ``node.meta``: the node whose cast this is.
_SOURCE = "fxamp_cast_input"

#: Key of ``node.meta``: the inlined call that the cast is for.
_CALL = "fxamp_cast_for"

#: Key of a body's ``meta``: its inputs are cast.
_DONE = "fxamp_inputs_cast"


def cast_inputs(body: GraphModule, dtype: torch.dtype, context: CastContext) -> None:
    """Apply ``custom_fwd(cast_inputs=dtype)`` to the inputs of a forward that runs under autocast."""
    if body.meta.get(_DONE):
        return
    body.meta[_DONE] = True
    placeholders = body.graph.find_nodes(op="placeholder")
    for placeholder in placeholders:
        if context.eligible(placeholder.meta.get("val")):
            cast = _cast(placeholder, dtype, placeholders[-1].next, context)
            placeholder.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)


def cast_inlined(node: Node, context: CastContext, in_function: bool) -> bool:
    """Whether ``node`` is in such a forward that Dynamo inlined; its inputs from outside that forward are cast.

    ``in_function``: the node is in a body of another Function.
    """
    call = inlined_call(node, in_function)
    if call is None or call.request.cast_inputs is None or call.request.device != context.policy.device:
        return False
    for source in node.all_input_nodes:
        inside = call in (source.meta.get(_CALL), inlined_call(source, in_function))
        if not inside and context.eligible(source.meta.get("val")):
            before = [user for user in source.users if user.meta.get(_CALL) == call]
            cast = before[0] if before else _cast(source, call.request.cast_inputs, node, context)
            cast.meta[_CALL] = call
            node.replace_input_with(source, cast)
    return True


def drop_outermost_region(body: GraphModule) -> None:
    """Remove the region in which ``custom_bwd`` disabled autocast, as in the captured forward: now autocast is on."""
    enter = next((node for node in body.graph.nodes if node.target is ENTER_AUTOCAST), None)
    if enter is not None:
        erase_region(enter)


def before_custom_cast(node: Node) -> Node:
    """Return the input of ``node`` if it is the cast that ``custom_fwd`` asks for; else ``node``."""
    source: Node = node.meta.get(_SOURCE, node)
    return source


def _cast(source: Node, dtype: torch.dtype, before: Node, context: CastContext) -> Node:
    with before.graph.inserting_before(before):
        cast = GraphWriter(before.graph, context.mode).call(torch.ops.aten.to.dtype, source, dtype)
    cast.meta[_SOURCE] = source
    decide(cast, Decision(None, None, _WHY))
    return cast
