"""Descriptions of tensors, from which sample calls are built in any dtype on any device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Spec:
    """A tensor to be made: its shape, and the dtype it must have; None if it is a floating input that variants vary."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Sample:
    """The arguments of one call, with Specs where tensors go; values play no role, for the tensors are fake."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def floats(self) -> int:
        """Return how many floating inputs the call has."""
        specs: list[Spec] = []
        self._map(lambda spec: specs.append(spec) if spec.dtype is None else None)
        return len(specs)

    def build(self, dtypes: tuple[torch.dtype, ...], device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the floating inputs in ``dtypes``, in their order."""
        left = iter(dtypes)

        def make(spec: Spec) -> torch.Tensor:
            return torch.empty(spec.shape, dtype=spec.dtype or next(left), device=device)

        return self._map(make)

    def _map(self, leaf: Callable[[Spec], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = tuple(_map(value, leaf) for value in self.args)
        return args, {key: _map(value, leaf) for key, value in self.kwargs.items()}


def _map(value: Any, leaf: Callable[[Spec], Any]) -> Any:
    if isinstance(value, Spec):
        return leaf(value)
    return [_map(item, leaf) for item in value] if isinstance(value, list) else value


def floating(*shape: int) -> Spec:
    """A floating input whose dtype the variants choose."""
    return Spec(shape)


def integer(*shape: int) -> Spec:
    """An int64 tensor: indices, labels, lengths."""
    return Spec(shape, torch.int64)


def int32(*shape: int) -> Spec:
    """An int32 tensor: pivots, zero points."""
    return Spec(shape, torch.int32)


def call(*args: Any, **kwargs: Any) -> Sample:
    """The sample call with these arguments."""
    return Sample(args, kwargs)
