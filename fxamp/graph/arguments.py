"""The arguments of an ATen call by their schema's names, whether passed by position or by keyword."""

from collections.abc import Iterator
from typing import Any

from torch import Argument
from torch._ops import OpOverload
from torch.fx import Node


def arguments(node: Node) -> Iterator[tuple[Argument, Any]]:
    """Yield every argument of the schema with the value that the call passes; else its default, or None."""
    assert isinstance(node.target, OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            yield argument, node.args[position]
        else:
            yield argument, node.kwargs.get(argument.name, argument.default_value)


def argument(node: Node, name: str) -> Any:
    """Return the value that :func:`arguments` gives for ``name``; None if the schema has no such argument."""
    return next((value for parameter, value in arguments(node) if parameter.name == name), None)


def set_argument(node: Node, name: str, value: Any) -> None:
    """Pass ``value`` as the argument ``name``: in place if the call already passes it, else by keyword."""
    assert isinstance(node.target, OpOverload)
    for position, parameter in enumerate(node.target._schema.arguments):
        if parameter.name == name and position < len(node.args) and not parameter.kwarg_only:
            node.update_arg(position, value)
            return
    node.update_kwarg(name, value)
