"""Capture: convert the user's input (a Dynamo graph, a callable, an ExportedProgram) to the pre-dispatch ATen graph."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node, map_arg
from torch.utils import _pytree as pytree

from fxamp.capture.aten_trace import trace_aten
from fxamp.capture.autocast_state import AUTOCAST, in_autocast_states
from fxamp.capture.autograd_functions import CustomAutocast, custom_autocast, inlined_call
from fxamp.capture.fakes import fake_inputs, fake_like
from fxamp.capture.function_writes import copy_marked_results, require_separate_results
from fxamp.capture.leaked_tensors import require_own_tensors
from fxamp.capture.operands import part_operands
from fxamp.capture.regions import IN_TRANSFORM, VERBATIM
from fxamp.graph import attribute, dtype_of, fake_mode_of, graph_output, returned, tensor_value
from fxamp.graph.higher_order_ops import AutogradFunction, autograd_function, bodies, gradient_hook, inner_graphs
from fxamp.torch_private import without_saved_tensors_hooks

__all__ = [
    "CUSTOM_AUTOCAST",
    "IN_TRANSFORM",
    "OUTPUT_DTYPES",
    "VERBATIM",
    "Captured",
    "CustomAutocast",
    "capture",
    "inlined_call",
    "is_verbatim",
]

#: Key of ``node.meta``: the :class:`CustomAutocast` of an autograd.Function's node.
CUSTOM_AUTOCAST = "fxamp_custom_autocast"

#: Key of the output node's ``meta``: the captured dtype of every leaf of the output, None if it is not a tensor.
OUTPUT_DTYPES = "fxamp_output_dtypes"


@dataclass(frozen=True)
class Captured:
    """A pre-dispatch ATen graph and the fake mode that every ``meta["val"]`` in it belongs to."""

    module: GraphModule
    mode: FakeTensorMode


def capture(gm: GraphModule, inputs: Sequence[Any]) -> Captured:
    """Trace ``gm`` (torch functions, methods, higher-order ops) for ``inputs``, real or fake, in placeholder order.

    The bodies of checkpoints, conds, custom autograd.Functions and hooks are traced too; those of other higher-order
    ops are not changed. Nothing runs on real tensors; ``gm`` is not changed. Raises CaptureError if the graph would
    hold a tensor of the capture.
    """
    fakes, mode = fake_inputs(inputs)
    # Saved-tensor hooks of the program (a checkpoint, an offloader) must not pack what tracing saves.
    with without_saved_tensors_hooks():
        traced = _trace_tree(gm, fakes, mode)
    require_own_tensors(traced, gm)
    output = graph_output(traced.graph)
    output.meta[OUTPUT_DTYPES] = [dtype_of(leaf) for leaf in pytree.tree_leaves(output.args[0])]
    return Captured(traced, mode)


def is_verbatim(node: Node) -> bool:
    """Whether a call is in the graph as Dynamo captured it, so that fxamp does not look inside."""
    return VERBATIM in node.meta and not inner_graphs(node)


def _trace_tree(gm: GraphModule, fakes: Sequence[Any], mode: FakeTensorMode) -> GraphModule:
    traced = trace_aten(gm, fakes, mode)
    for node in list(traced.graph.nodes):
        hook = gradient_hook(node)
        for body in bodies(node) if hook is None else [hook]:
            with in_autocast_states(node.meta[AUTOCAST]):
                body.replace(_trace_body(body.module, _values(body.operands, mode), mode))
        part_operands(node, mode)
        function = autograd_function(node)
        if function is not None:
            _trace_function(node, function, mode)
    return traced


def _trace_body(gm: GraphModule, fakes: Sequence[Any], mode: FakeTensorMode) -> GraphModule:
    """As :func:`_trace_tree`; a call makes each constant, because AOTAutograd accepts no constants in branches."""
    body = _trace_tree(gm, fakes, mode)
    copies = body.graph.find_nodes(op="call_function", target=torch.ops.aten.lift_fresh_copy.default)
    for node in copies:
        source = node.args[0]
        constant = attribute(body, str(source.target)) if source.op == "get_attr" else None
        if isinstance(constant, torch.Tensor) and fake_mode_of(constant) is None:
            node.target = torch.tensor
            node.args = (constant.tolist(),)
            node.kwargs = {"dtype": constant.dtype, "device": constant.device}
            if not source.users:
                body.graph.erase_node(source)
    if copies:
        body.recompile()
    return body


def _trace_function(node: Node, function: AutogradFunction, mode: FakeTensorMode) -> None:
    require_separate_results(function.forward.module)
    node.meta[CUSTOM_AUTOCAST] = custom_autocast(*inner_graphs(node))
    forward = _trace_body(function.forward.module, _values(function.forward.operands, mode), mode)
    copy_marked_results(node, function, forward)
    function.forward.replace(forward)
    outputs, saved = returned(forward.graph)
    incoming = [*_gradients(outputs), *saved]
    function.backward.replace(_trace_body(function.backward.module, _values(incoming, mode), mode))


def _gradients(outputs: Any) -> list[Node | None]:
    """Return what a backward gets for the forward's outputs: sizes, which Dynamo 2.11 returns, have no gradient."""
    leaves = pytree.tree_leaves(outputs)
    return [leaf if tensor_value(leaf) is not None else None for leaf in leaves]


def _values(arguments: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """Return the values of fx arguments; tensors are new fakes, so a body's in-place ops cannot change outer values."""
    return [map_arg(argument, lambda node: fake_like(node.meta["val"], mode)) for argument in arguments]
