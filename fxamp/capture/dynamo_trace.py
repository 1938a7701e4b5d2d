"""Trace a callable, a module or an exported program to a graph with flat inputs, without running it."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxamp.capture.autocast_state import autocast_states, in_autocast_states
from fxamp.capture.shared_state import read_state, share_state, state_of
from fxamp.errors import CaptureError
from fxamp.torch_private import lost_changes, raising_lost_changes, returning_nothing
from fxamp.torch_private.parts.dynamo import dynamo_graph_capture_for_export
from fxamp.torch_private.parts.fx import COPIED_ATTRIBUTES


@dataclass(frozen=True)
class Traced:
    """A graph, the values of its placeholders (including parameters and buffers), and the caller's calling convention.

    ``source`` is the traced module, None if it was not a module.
    """

    module: GraphModule
    inputs: list[Any]
    source: torch.nn.Module | None = None

    def bind(self, rewritten: GraphModule) -> GraphModule:
        """Make ``rewritten``, with the same placeholders, take the source's arguments and return its output structure.

        If the source is a module, ``rewritten`` holds its parameters and buffers under the same names. It reads other
        tensors that are not arguments from the source at each call, and so do its copies.
        """
        if self.source is not None:
            share_state(rewritten, self.source)
        codegen = copy(self.module.graph._codegen)
        if hasattr(self.module, _FLATTEN):
            flatten, unflatten = _Shared(getattr(self.module, _FLATTEN)), _Shared(getattr(self.module, _UNFLATTEN))
            if self.source is not None:
                flatten = _Shared(_Picked(flatten, read_state(rewritten, self.source, self.inputs)))
            codegen.dynamo_bytecode_flatten = flatten  # type: ignore[attr-defined]
            codegen.dynamo_bytecode_unflatten = unflatten  # type: ignore[attr-defined]
            convention = {_FLATTEN: flatten, _UNFLATTEN: unflatten}
            vars(rewritten).update(convention)
            rewritten.meta[COPIED_ATTRIBUTES] = convention
            for key in _UNCOPIED:
                rewritten.meta.pop(key, None)
        rewritten.graph.set_codegen(codegen)
        rewritten.recompile()
        return rewritten


@dataclass(frozen=True)
class _Picked:
    """Selects some of the values that ``flatten`` returns."""

    flatten: Callable[..., Sequence[Any]]
    positions: list[int]

    def __call__(self, *arguments: Any) -> list[Any]:
        flat = self.flatten(*arguments)
        return [flat[position] for position in self.positions]


@dataclass(frozen=True)
class _Shared:
    """Calls Dynamo's ``function``, which cannot be copied: copies of a module share it."""

    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __deepcopy__(self, memo: object) -> Self:
        return self


#: Ignore earlier traces: Dynamo would make a number or size symbolic if it differs from the last trace.
_CONSTANTS = {"specialize_int": True, "specialize_float": True, "automatic_dynamic_shapes": False}

#: Keys of a captured graph's ``meta``: what Dynamo knew of the inputs, which keeps copy.deepcopy from copying a module.
_UNCOPIED = ("fake_mode", "tracing_context")

_FLATTEN = "_dynamo_bytecode_flatten"
_UNFLATTEN = "_dynamo_bytecode_unflatten"


def _reason(error: Exception) -> str:
    """Return Dynamo's reason without its advice on debugging Dynamo: the first line and the explanation."""
    if "backend_input" in str(error):
        return "it computes nothing"
    changed = lost_changes(error)
    if changed:
        return f"it changes {', '.join(changed)}, which the new module would not; accepted: writes to buffers in place"
    lines = [line.strip() for line in str(error).splitlines()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    return ". ".join([*lines[:1], *explained])


def _place(error: Exception) -> str:
    """Return the line of the program at which Dynamo stopped, as part of a message; ``""`` if the error has none."""
    stack = getattr(error, "real_stack", None)
    return f" at {stack[-1].filename}:{stack[-1].lineno}" if stack else ""


def trace(source: Callable[..., Any] | GraphModule | ExportedProgram, inputs: Sequence[Any]) -> Traced:
    """Trace ``source`` called with the positional ``inputs``, real or fake.

    A GraphModule is used as is: its placeholders are the inputs. Dynamo captures anything else as one graph. Numbers
    among the inputs become constants. Raises CaptureError, with the line and Dynamo's reason, if that is impossible.
    """
    call = _without_guards(source.module()) if isinstance(source, ExportedProgram) else source
    held = call if isinstance(call, torch.nn.Module) else None
    if isinstance(call, GraphModule) and not hasattr(call, _FLATTEN):
        return Traced(call, _flat(call, inputs), held)
    if not callable(call):
        kind = type(source).__name__
        raise CaptureError(
            f"cannot capture an object of type {kind}; accepted: a function, nn.Module or ExportedProgram"
        )
    inputs = _distinct(inputs, held)
    try:
        # Dynamo leaves autocast in the state that the program sets.
        own_states = in_autocast_states(autocast_states())
        with torch._dynamo.config.patch(_CONSTANTS), returning_nothing(), raising_lost_changes(), own_states:
            module = dynamo_graph_capture_for_export(call)(*inputs)
    except Exception as error:
        name = getattr(call, "__name__", type(call).__name__)
        message = f"{name} could not be captured as one graph{_place(error)}: {_reason(error)}"
        raise CaptureError(message) from error
    if not module.graph.find_nodes(op="placeholder"):
        return Traced(module, [], held)
    with torch.no_grad():
        flat = getattr(module, _FLATTEN)(*inputs)
    return Traced(module, list(flat), held)


def _flat(gm: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Return the values of the placeholders of ``gm``; those that are not among ``inputs`` are the defaults."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    given = list(gm.graph.process_inputs(*inputs))
    values = [*given, *(default for node in placeholders[len(given) :] for default in node.args)]
    if len(values) != len(placeholders):
        names = ", ".join(node.name for node in placeholders)
        raise CaptureError(
            f"example_inputs have {len(given)} values; accepted: {len(placeholders)}, in the order of the graph's "
            f"inputs ({names}), keyword arguments included"
        )
    return values


def _distinct(inputs: Sequence[Any], module: torch.nn.Module | None) -> Sequence[Any]:
    """Return the inputs; each tensor that occurred before, or that the module holds, is replaced by a new object.

    Dynamo recognizes inputs by their objects: the captured graph would have one input for both arguments.
    """
    known = {id(tensor) for tensor in state_of(module).values()} if module is not None else set()

    def distinct(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in known:
            return value.detach().requires_grad_(value.requires_grad)
        known.add(id(value))
        return value

    copied: Sequence[Any] = pytree.tree_map(distinct, tuple(inputs))
    return copied


def _without_guards(module: torch.nn.Module) -> GraphModule:
    """Remove the call that checks the inputs from an exported module: the capture is valid only for these inputs."""
    assert isinstance(module, GraphModule)
    for node in list(module.graph.nodes):
        if node.op == "call_module" and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return module
