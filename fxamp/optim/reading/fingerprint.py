"""Reduce a value to what a trace that reads it depends on: hashable and comparable."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def fingerprint(value: Any) -> Hashable:
    """Plain values by type and value, containers by their items, tensors by :func:`looks`, others by identity."""
    if isinstance(value, Tensor):
        return looks(value)
    if isinstance(value, PLAIN):
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        return (type(value), *map(fingerprint, value))
    if isinstance(value, dict):
        return (type(value), *((key, fingerprint(item)) for key, item in value.items()))
    return (type(value), id(value))


def looks(tensor: Tensor) -> Hashable:
    """Return the properties of a tensor that compiled code assumes."""
    if tensor.layout is not torch.strided:
        return (tensor.layout, tensor.shape, tensor.dtype, tensor.device)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, getattr(tensor, "form", None))
