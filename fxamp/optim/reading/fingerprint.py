"""Reduce a value to the properties that a trace depends on, hashable and comparable."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)

#: Attributes of every optimizer; a step's result does not depend on them.
COMMON = frozenset(vars(torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.1))) | {
    *("_opt_called", "step", "grad_scale", "found_inf")
}

_LIFTED = "a number that the step reads when it runs"


class _Identity:
    """One object, by identity. It never equals another object, not even one that has a freed object's address.

    The object is not kept alive, because it may lead to the optimizer; one that has no weak references is.
    """

    __slots__ = ("_address", "_object")

    def __init__(self, value: Any) -> None:
        self._address = id(value)
        try:
            self._object: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._object = lambda: value

    def __hash__(self) -> int:
        return self._address

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        own = self._object()
        return isinstance(other, _Identity) and own is not None and own is other._object()


def fingerprint(value: Any) -> Hashable:
    """Plain values by type and value, containers by items, tensors by :func:`tensor_properties`, others by identity."""
    if isinstance(value, Tensor):
        return tensor_properties(value)
    if isinstance(value, PLAIN):
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        return (type(value), *map(fingerprint, value))
    if isinstance(value, dict):
        return (type(value), *((key, fingerprint(item)) for key, item in value.items()))
    return (type(value), _Identity(value))


def tensor_properties(tensor: Tensor) -> Hashable:
    """Return the properties of a tensor that compiled code assumes."""
    if tensor.layout is not torch.strided:
        return (tensor.layout, tensor.shape, tensor.dtype, tensor.device)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, getattr(tensor, "form", None))


def setting_fingerprint(value: Any) -> Hashable:
    """Return the properties of a group's setting that a trace depends on: everything except the values of floats."""
    if type(value) is float:
        return _LIFTED
    if type(value) in (tuple, list):
        return (type(value), *map(setting_fingerprint, value))
    return fingerprint(value)


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes that this optimizer has besides those of every optimizer."""
    return {name: value for name, value in vars(optimizer).items() if name not in COMMON}
