"""Run a Triton kernel in Triton's interpreter on CPU tensors, while other kernels of the process are compiled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import standard
from triton.runtime.interpreter import InterpretedFunction


class Interpreted:
    """Wraps a jitted kernel, with the same launch syntax: ``Interpreted(kernel)[grid](*arguments, **options)``."""

    def __init__(self, kernel: Any) -> None:
        self.function = InterpretedFunction(kernel.fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            # numpy warns about overflow, and about inf and NaN; a GPU does not.
            with _interpreted_reductions(), np.errstate(all="ignore"):
                self.function[grid](*arguments, **options)

        return launch


@contextmanager
def _interpreted_reductions() -> Iterator[None]:
    """Replace ``tl.max`` and ``tl.sum``: they are jitted functions, which an interpreted kernel cannot call.

    Interpreting them too would leave ``triton.language`` patched. ``tl.reduce`` is interpreted while a kernel runs.
    """
    jitted = tl.max, tl.sum
    tl.max = lambda values, axis: tl.reduce(values, axis, standard._elementwise_max)
    tl.sum = lambda values, axis: tl.reduce(values, axis, standard._sum_combine)
    try:
        yield
    finally:
        tl.max, tl.sum = jitted
