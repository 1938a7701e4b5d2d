"""The scale: what uses it, how it multiplies, and how it is set to a value from the user."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

Owner = weakref.ReferenceType[Tensor] | None
"""The parameter that a compiled graph's gradient belongs to; None if it belongs to no parameter."""


class Flags(Protocol):
    """Where backwards report overflows; see :class:`fxamp.scaler.graphs.graph_flags.GraphFlags`."""

    def record(
        self,
        owners: Callable[[], Sequence[Owner]],
        flags: Tensor,
        gradients: Sequence[Tensor],
        square: Tensor | None = None,
        dense: bool = False,
    ) -> None: ...

    def note_forward(self, wrapper: DistributedDataParallel) -> None: ...


class BackwardScaler(Protocol):
    """The part of a scaler that backwards use."""

    graph_norm: bool
    used: bool

    @property
    def graphs(self) -> Flags: ...

    def attach(self) -> None: ...

    def graph_scale(self, device: torch.device) -> Tensor:
        """Return the scale, 0-dim float32 on ``device``."""

    def note_unused(self, flags: Tensor) -> None:
        """Note whether a backward overflowed; called while the scaler is not ``used``, that is, not called yet."""


def times(value: Tensor, factor: Tensor) -> Tensor:
    """``value`` times a 0-dim float32, in float32 at least, rounded to the dtype of ``value``."""
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    return (wide * factor).to(value.dtype)


def map_tensors(outputs: Any, apply: Callable[[Tensor], Tensor]) -> Any:
    """Return ``outputs``, a tensor or nested iterables of tensors, with ``apply`` called on every tensor in it.

    Lists and tuples keep their type, including named tuples; any other iterable becomes a lazy generator.

    Raises:
        ValueError: something in ``outputs`` is neither a tensor nor an iterable of tensors.
    """
    if isinstance(outputs, Tensor):
        return apply(outputs)
    # A string is an iterable of strings: recursion would not end.
    if isinstance(outputs, str) or not isinstance(outputs, Iterable):
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, not {type(outputs).__name__}")
    mapped = (map_tensors(output, apply) for output in outputs)
    if not isinstance(outputs, (list, tuple)):
        return mapped
    make: Callable[[Iterable[Any]], Any] = getattr(outputs, "_make", type(outputs))
    return make(mapped)


def set_scale_(scale: Tensor, new_scale: Any, device_type: str) -> None:
    """Copy ``new_scale`` into ``scale``: a number, or a one-element tensor on a ``device_type`` device, without grad.

    Raises:
        AssertionError: ``new_scale`` is something else.
    """
    if isinstance(new_scale, (int, float)) and not isinstance(new_scale, bool):
        scale.fill_(new_scale)
        return
    usable = (
        isinstance(new_scale, Tensor)
        and new_scale.device.type == device_type
        and new_scale.numel() == 1
        and not new_scale.requires_grad
    )
    if not usable:
        name = f"{type(new_scale).__name__} {new_scale!r}"
        raise AssertionError(
            f"new_scale should be a number or a 1-element {device_type} tensor with requires_grad=False, not {name}"
        )
    scale.copy_(new_scale.reshape(()))
