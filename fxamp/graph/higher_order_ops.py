"""How the operands of known higher-order ops are bound to the inputs of their bodies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxamp.graph.nodes import returned

_ops = torch.ops.higher_order


@dataclass(frozen=True)
class Body:
    """One body of a higher-order node: its ``get_attr`` node, its graph, and the operands bound to its inputs."""

    attribute: Node
    module: GraphModule
    operands: tuple[Any, ...]

    def replace(self, module: GraphModule) -> None:
        """Replace this body by ``module`` in the owning module."""
        owner = self.attribute.graph.owning_module
        setattr(owner, str(self.attribute.target), module)


@dataclass(frozen=True)
class AutogradFunction:
    """A custom ``torch.autograd.Function``. Its forward takes the operands, its backward gradients, then saved values.

    The forward returns ``(outputs, saved)``, the backward one gradient per operand. The node has no operands for the
    backward.
    """

    forward: Body
    backward: Body


def _body(node: Node, index: int, operands: tuple[Any, ...]) -> Body:
    attribute = node.args[index]
    assert isinstance(attribute, Node)
    module = getattr(node.graph.owning_module, str(attribute.target))
    return Body(attribute, module, operands)


def _whole(node: Node) -> list[Body]:
    return [_body(node, 0, tuple(node.args[1:]))]


def _branches(node: Node) -> list[Body]:
    operands = node.args[3] if len(node.args) > 3 else node.kwargs.get("operands", ())
    return [_body(node, index, tuple(operands)) for index in (1, 2)]  # type: ignore[arg-type]


_BODIES: dict[HigherOrderOperator, Callable[[Node], list[Body]]] = {
    _ops.tag_activation_checkpoint: _whole,
    _ops.wrap: _whole,
    _ops.cond: _branches,
}

#: Key of ``node.meta`` of an op whose bodies are left as Dynamo captured them; for fxamp, it has none.
OPAQUE = "fxamp_opaque"


def _known(node: Node) -> HigherOrderOperator | None:
    """Return the higher-order op that ``node`` calls; None if it calls no such op, or one that is opaque."""
    return node.target if isinstance(node.target, HigherOrderOperator) and OPAQUE not in node.meta else None


def bodies(node: Node) -> list[Body]:
    """Return the bodies of a known op whose results are the node's results; empty for every other node."""
    op = _known(node)
    find = None if op is None else _BODIES.get(op)
    return find(node) if find is not None else []


def autograd_function(node: Node) -> AutogradFunction | None:
    """Return the forward and backward of a custom autograd.Function's node; None for any other node.

    Also None if the numbers of inputs and outputs do not match: such a node is not changed.
    """
    if _known(node) is not _ops.autograd_function_apply:
        return None
    forward = _body(node, 0, tuple(node.args[2:]))
    backward = _body(node, 1, ())
    results = returned(forward.module.graph)
    if not isinstance(results, (tuple, list)) or len(results) != 2:
        return None
    outputs, saved = results
    expected = len(pytree.tree_leaves(outputs)) + len(saved)
    if len(backward.module.graph.find_nodes(op="placeholder")) != expected:
        return None
    return AutogradFunction(forward, backward)


def gradient_hook(node: Node) -> Body | None:
    """Return the body of ``tensor.register_hook``; None for any other node.

    It takes the gradient, here bound to the tensor, and what else it reads; it returns a gradient of the same dtype, or
    None. The node's result is the tensor.
    """
    op = _known(node)
    if op is None or op._name != "register_hook":
        return None
    return _body(node, 1, (node.args[0], *node.args[2:]))


def inner_graphs(node: Node) -> list[GraphModule]:
    """Return the graphs in a node that fxamp looks into: the bodies of a known op, a Function's two, or a hook's."""
    function, hook = autograd_function(node), gradient_hook(node)
    parts = bodies(node) if function is None else [function.forward, function.backward]
    return [part.module for part in (parts if hook is None else [hook])]
