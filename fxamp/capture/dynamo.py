"""A callable, a module or an exported program becomes a graph with flat inputs, without running it."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxamp.capture.shared_state import read_state, share_state
from fxamp.errors import CaptureError


@dataclass(frozen=True)
class Traced:
    """A graph, the values of its placeholders (parameters and buffers among them), and the way back to the caller.

    ``given`` are the caller's arguments, flat. ``source`` is the module that was traced, if it was one.
    """

    module: GraphModule
    inputs: list[Any]
    given: list[Any]
    source: torch.nn.Module | None = None

    def bind(self, rewritten: GraphModule) -> GraphModule:
        """Make ``rewritten``, which has the same placeholders, take the source's arguments and return its structure.

        It holds the parameters and buffers of a source that is a module, under their names. Other tensors that the
        source does not get as arguments are read from where it has them, at each call.
        """
        if self.source is not None:
            share_state(rewritten, self.source)
        codegen = copy(self.module.graph._codegen)
        if hasattr(self.module, _FLATTEN):
            flatten = getattr(self.module, _FLATTEN)
            if self.source is not None:
                flatten = _Picked(flatten, read_state(rewritten, self.source, self.inputs, self.given))
            codegen.dynamo_bytecode_flatten = flatten  # type: ignore[attr-defined]
            setattr(rewritten, _FLATTEN, flatten)
            setattr(rewritten, _UNFLATTEN, getattr(self.module, _UNFLATTEN))
        rewritten.graph.set_codegen(codegen)
        rewritten.recompile()
        return rewritten


@dataclass(frozen=True)
class _Picked:
    """Some of the values that ``flatten`` returns."""

    flatten: Callable[..., Sequence[Any]]
    positions: list[int]

    def __call__(self, *arguments: Any) -> list[Any]:
        flat = self.flatten(*arguments)
        return [flat[position] for position in self.positions]


#: What was traced before has no say: Dynamo would take a number or a size that differs from last time for a symbol.
_CONSTANTS = {"specialize_int": True, "specialize_float": True, "automatic_dynamic_shapes": False}

_FLATTEN = "_dynamo_bytecode_flatten"
_UNFLATTEN = "_dynamo_bytecode_unflatten"


def trace(source: Callable[..., Any] | GraphModule | ExportedProgram, inputs: Sequence[Any]) -> Traced:
    """Trace ``source`` called with the positional ``inputs``, real or fake.

    A GraphModule is taken as it is: its placeholders are the inputs. Anything else is captured by Dynamo as one graph.
    The numbers among the inputs become constants.
    Raises CaptureError if that is impossible, naming Dynamo's reason.
    """
    call = _without_guards(source.module()) if isinstance(source, ExportedProgram) else source
    held = call if isinstance(call, torch.nn.Module) else None
    given = pytree.tree_leaves(inputs)
    if isinstance(call, GraphModule) and not hasattr(call, _FLATTEN):
        return Traced(call, list(call.graph.process_inputs(*inputs)), given, held)
    if not callable(call):
        kind = type(source).__name__
        raise CaptureError(
            f"cannot capture an object of type {kind}; accepted: a function, nn.Module or ExportedProgram"
        )
    try:
        with torch._dynamo.config.patch(_CONSTANTS):
            module = dynamo_graph_capture_for_export(call)(*inputs)
    except Exception as error:
        name = getattr(call, "__name__", type(call).__name__)
        raise CaptureError(f"{name} could not be captured as one graph: {error}") from error
    if not module.graph.find_nodes(op="placeholder"):
        return Traced(module, [], given, held)
    with torch.no_grad():
        flat = getattr(module, _FLATTEN)(*inputs)
    return Traced(module, list(flat), given, held)


def _without_guards(module: torch.nn.Module) -> GraphModule:
    """An exported module without the call that checks its inputs: the capture is for these inputs anyway."""
    assert isinstance(module, GraphModule)
    for node in list(module.graph.nodes):
        if node.op == "call_module" and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return module
