"""Small readings of dtypes off the arguments and results of a call."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

Dtypes = tuple[torch.dtype, ...]


def input_dtypes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Dtypes:
    """Return the dtypes of the floating tensors among a call's arguments, in their order."""
    tensors = (leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor))
    return tuple(tensor.dtype for tensor in tensors if tensor.is_floating_point())


def output_dtypes(result: Any) -> Dtypes:
    """Return the dtypes of all tensors that a call returned, in their order."""
    return tuple(leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
