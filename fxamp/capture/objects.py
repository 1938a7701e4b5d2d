"""Values that fx cannot write into a graph's code as constants because their text is not Python, such as C++ enums.

A graph computes such an object by the call that the program makes, or reads it from its module.
"""

from enum import Enum, Flag
from typing import Any

from torch import Tensor
from torch.fx.node import base_types
from torch.nn import Module
from torch.utils import _pytree as pytree

#: The types of arguments that fx writes as constants; a module is held by the graph's module.
_CONSTANTS = (*base_types, Module, type(None), type(...), slice, range, Enum)


def is_object(value: Any) -> bool:
    """Whether ``value``, which may be a tree, holds no tensors, and something that cannot be a constant of a graph."""
    leaves = pytree.tree_leaves(value)
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        return False
    return any(isinstance(leaf, Flag) or not isinstance(leaf, _CONSTANTS) for leaf in leaves)
