"""Inline the bodies of calls that stand for regions of a program.

- ``torch.compiler.nested_compile_region``: several calls share one body, which torch compiles once. A policy may cast
  each call differently: rules name the module that the call is in, and casts depend on the dtypes of its operands. And
  torch's backend "eager" cannot run the backward of such a call.
- Blocks under ``no_grad`` or ``torch.autocast`` in a program from ``torch.export``. Such a call becomes its ops between
  two marks, as Dynamo writes them.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from fxamp.graph import ENTER_AUTOCAST, EXIT_AUTOCAST, attribute

_NESTED = torch.ops.higher_order.invoke_subgraph
_GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast

#: For each kind of call the positions of its body and of the body's first operand; other arguments describe the region.
_PLACES = {_NESTED: (0, 2), _GRAD_MODE: (1, 2), _AUTOCAST: (4, 5)}

_STACK = "nn_module_stack"

Stack = Mapping[Any, tuple[str, Any]]
"""The modules that a call is in, outermost first: each with its path and its class."""


def inline_regions(gm: GraphModule) -> GraphModule:
    """Return Dynamo's graph ``gm`` without such calls: ``gm`` itself if it has none, else a copy."""
    if not any(gm.graph.find_nodes(op="call_function", target=target) for target in _PLACES):
        return gm
    inlined = _Inlined()
    inlined.add(gm, None, {}, {})
    copy = GraphModule(inlined.attributes, inlined.graph, type(gm).__name__)
    copy.meta.update(gm.meta)
    return copy


class _Inlined:
    """A graph in the making, and the ``attributes`` that it reads, by their names."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.attributes: dict[str, object] = {}
        self._grad = torch.is_grad_enabled()

    def add(self, gm: GraphModule, operands: Sequence[Any] | None, first: Stack, call: Stack) -> Any:
        """Add the nodes of ``gm``, a body that is called with ``operands``, or the whole graph; return its results.

        ``call`` is the module stack of the call, ``first`` that of the call in which Dynamo traced the body.
        """
        inputs = gm.graph.find_nodes(op="placeholder")
        values: dict[Node, Any] = {} if operands is None else dict(zip(inputs, operands, strict=True))
        firsts: dict[str, Stack] = {}
        for node in gm.graph.nodes:
            stack = _moved(node.meta.get(_STACK) or {}, first, call)
            if node in values or (node.op == "get_attr" and _is_body(node)):
                continue
            if node.op == "output" and operands is not None:
                return map_arg(node.args[0], values.__getitem__)
            if node.target in _PLACES:
                body, start = _PLACES[node.target]
                name = str(node.args[body].target)
                inner = map_arg(node.args[start:], values.__getitem__)
                traced = firsts.setdefault(name, node.meta.get(_STACK) or {})
                with self._marked(node):
                    values[node] = self.add(cast(GraphModule, attribute(gm, name)), inner, traced, stack)
            elif node.target is operator.getitem and isinstance(values[node.args[0]], (tuple, list)):
                values[node] = values[node.args[0]][node.args[1]]
            else:
                values[node] = self._copy(gm, node, values, stack)
        return None

    @contextmanager
    def _marked(self, call: Node) -> Iterator[None]:
        """Open the region of ``call`` before the nodes that are added inside, and close it after them."""
        before = self._grad
        if call.target is _GRAD_MODE:
            self._grad = bool(call.args[0])
            self.graph.call_function(torch._C._set_grad_enabled, (self._grad,))
        entered = self.graph.call_function(ENTER_AUTOCAST, call.args[:4]) if call.target is _AUTOCAST else None
        yield
        if entered is not None:
            self.graph.call_function(EXIT_AUTOCAST, (entered,))
        if call.target is _GRAD_MODE:
            self._grad = before
            self.graph.call_function(torch._C._set_grad_enabled, (before,))

    def _copy(self, gm: GraphModule, node: Node, values: Mapping[Node, Any], stack: Stack) -> Node:
        copy = self.graph.node_copy(node, values.__getitem__)
        if node.op in ("get_attr", "call_module"):
            copy.target = self._held(str(node.target), attribute(gm, str(node.target)))
        if stack:
            copy.meta[_STACK] = stack
        return copy

    def _held(self, name: str, value: object) -> str:
        """Return the name of an attribute: ``name``, with a number if another attribute has it."""
        free, number = name, 0
        while self.attributes.setdefault(free, value) is not value:
            number += 1
            free = f"{name}_{number}"
        return free


def _is_body(node: Node) -> bool:
    return all(user.target in _PLACES and user.args[_PLACES[user.target][0]] is node for user in node.users)


def _moved(stack: Stack, first: Stack, call: Stack) -> Stack:
    """Return the module stack that a node in a body has in a different call than the one that Dynamo traced.

    ``first`` is the stack of the traced call, ``call`` that of the other one. A region that is not a method of a module
    keeps the paths of the first call's modules.
    """
    if not first or not call:
        return stack
    (before, _), (now, _) = list(first.values())[-1], list(call.values())[-1]
    below = (f"{before}.", f"{before}[")
    moved = {
        f"{key}@{now}": (now + path.removeprefix(before) if path.startswith(below) else path, kind)
        for key, (path, kind) in stack.items()
        if key not in first
    }
    return {**call, **moved}
