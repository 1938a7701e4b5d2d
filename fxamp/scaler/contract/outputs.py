"""Apply a function to the outputs passed to ``scaler.scale``: one tensor, or nested iterables of tensors."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def map_tensors(outputs: Any, apply: Callable[[Tensor], Tensor]) -> Any:
    """Return ``outputs`` with ``apply`` called on every tensor in it.

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
