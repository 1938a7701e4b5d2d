"""DTensors in compiled steps: each rank steps its own part, and no rank waits for another.

1. If gradient and state are laid out as the parameter, an elementwise step of a part equals that part of the whole
   tensor's step.
2. A gradient with another layout, such as a partial sum, is first redistributed to the layout of its parameter.
3. A sum over gradients is summed over the mesh dimensions that split them, with one collective call for each dimension
   for all gradients that are split alike.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = frozenset((Tensor, nn.Parameter, nn.Buffer))


def all_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor is of a subclass, torch's or the user's; faster than calling :func:`is_dtensor` for each."""
    return _PLAIN.issuperset(map(type, tensors))


def is_stored(value: Any) -> bool:
    """Whether it is a plain dense tensor with memory of its own, which wrappers and tensors on meta do not have."""
    return type(value) in _PLAIN and value.layout is torch.strided and not value.is_meta


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor; tests attributes, because a torch built without distributed has no such class."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def local(value: Any) -> Any:
    """Return this rank's part of a DTensor, always the same object; anything else unchanged."""
    if not isinstance(value, Tensor) or not is_dtensor(value):
        return value
    dtensor: Any = value
    part = dtensor._local_tensor  # to_local() makes a new view of a parameter at each call
    return part.wait() if hasattr(part, "trigger_wait") else part


def joined(part: Tensor, whole: Tensor) -> Tensor:
    """Return a DTensor with the layout of ``whole`` whose part on this rank is ``part``, a tensor of any class.

    ``from_local`` does not work here, because it takes a view.
    """
    dtensor: Any = whole
    joint: Tensor = type(dtensor)(part, dtensor._spec, requires_grad=False)
    return joint


def laid_out_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are DTensors of one mesh with equal placements, or are both no DTensors."""
    if not is_dtensor(one) or not is_dtensor(other):
        return is_dtensor(one) == is_dtensor(other)
    first, second = ((tensor.device_mesh, tensor.placements) for tensor in (one, other))  # type: ignore[attr-defined]
    return bool(first == second)


def settle_gradient(parameter: Tensor) -> Tensor | None:
    """Return the parameter's gradient, redistributed to the parameter's layout if it has another one.

    Redistribution is a collective call, which all ranks of the mesh must make.
    """
    gradient = parameter.grad
    if gradient is None or not (is_dtensor(gradient) and is_dtensor(parameter)) or laid_out_alike(gradient, parameter):
        return gradient
    dtensor: Any = parameter
    with torch.no_grad():
        parameter.grad = gradient.redistribute(dtensor.device_mesh, dtensor.placements)  # type: ignore[attr-defined]
    return parameter.grad


@dataclass(frozen=True)
class Spread:
    """How a tensor is split: its mesh, and the mesh dimensions that split it; none if every rank has all of it."""

    mesh: Any = None
    dimensions: tuple[int, ...] = ()


WHOLE = Spread()


def spread_of(tensor: Tensor) -> Spread:
    """Return how a tensor is split between ranks."""
    if not is_dtensor(tensor):
        return WHOLE
    dtensor: Any = tensor
    split = tuple(at for at, placement in enumerate(dtensor.placements) if not placement.is_replicate())
    return Spread(dtensor.device_mesh, split) if split else WHOLE


def sum_over_ranks_(total: Tensor, spread: Spread) -> Tensor:
    """Sum ``total`` in place over the ranks that hold the parts, without a host sync."""
    for dimension in spread.dimensions:
        torch.distributed.all_reduce(total, group=spread.mesh.get_group(dimension))
    return total
