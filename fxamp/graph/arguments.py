"""The arguments of an ATen call by their schema's names, whether they are passed by position or by keyword."""

from collections.abc import Iterator
from typing import Any

from torch import Argument
from torch._ops import OpOverload
from torch.fx import Node


def arguments(node: Node) -> Iterator[tuple[Argument, Any]]:
    """Every argument of the schema with what the call passes; its default, or None, where the call passes nothing."""
    assert isinstance(node.target, OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            yield argument, node.args[position]
        else:
            yield argument, node.kwargs.get(argument.name, argument.default_value)


def argument(node: Node, name: str) -> Any:
    """What :func:`arguments` gives for ``name``; None if the schema has no such argument."""
    return next((value for found, value in arguments(node) if found.name == name), None)


def set_argument(node: Node, name: str, value: Any) -> None:
    """Pass ``value`` as the argument ``name``: where the call passes it already, else by keyword."""
    assert isinstance(node.target, OpOverload)
    for position, found in enumerate(node.target._schema.arguments):
        if found.name == name and position < len(node.args) and not found.kwarg_only:
            node.update_arg(position, value)
            return
    node.update_kwarg(name, value)
