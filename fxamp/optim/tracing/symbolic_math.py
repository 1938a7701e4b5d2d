"""Let ``math.sqrt`` and ``math.pow`` take symbolic floats, as torch.compile does, while a step's own code is traced.

``math`` converts its arguments to floats, which would make a counter such as ``group["step"]`` a constant of the trace.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import SymFloat

_FORMS: dict[str, Callable[..., Any]] = {
    "sqrt": torch._sym_sqrt,  # type: ignore[attr-defined]
    "pow": operator.pow,
}


@contextmanager
def symbolic_math() -> Iterator[None]:
    """Replace the functions in the block. For ordinary numbers, in other threads too, they return what they did."""
    originals = {name: getattr(math, name) for name in _FORMS}
    for name, original in originals.items():
        setattr(math, name, _either(_FORMS[name], original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(math, name, original)


def _either(form: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any) -> Any:
        return (form if any(isinstance(arg, SymFloat) for arg in args) else original)(*args)

    return function
