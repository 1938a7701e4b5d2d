"""Hand the gradients of a backward graph over while it runs: ``torch.ops.fxamp.hand_over``.

The op has no result. The caller that runs the graph receives the gradients through :func:`receiving`, and may write to
the parameters that the op names; then the graph frees the gradients.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

#: Takes gradients and the positions that they would have among the graph's outputs.
Receiver = Callable[[Sequence[Tensor], Sequence[int]], None]

_LIBRARY = torch.library.Library("fxamp", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "hand_over(Tensor[] gradients, Tensor(a!)[] weights, int[] places) -> ()", tags=(torch.Tag.cudagraph_unsafe,)
)


class _Receivers(threading.local):
    """The receivers of the backwards that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Receiver] = []


_receivers = _Receivers()


@contextmanager
def receiving(receiver: Receiver) -> Iterator[None]:
    """Within the block, ``receiver`` gets the gradients that graphs running in this thread hand over."""
    _receivers.stack.append(receiver)
    try:
        yield
    finally:
        _receivers.stack.pop()


@torch.library.impl(_LIBRARY, "hand_over", "CompositeExplicitAutograd")
def hand_over(gradients: Sequence[Tensor], weights: Sequence[Tensor], places: Sequence[int]) -> None:
    """Give ``gradients``, which belong to the outputs at ``places``, to the receiver, which may write to ``weights``.

    Raises RuntimeError if nothing receives them.
    """
    if not _receivers.stack:
        raise RuntimeError("a backward graph hands gradients over, but nothing receives them: it runs outside of fxamp")
    _receivers.stack[-1](gradients, places)


@torch.library.register_fake("fxamp::hand_over", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(gradients: Sequence[Tensor], weights: Sequence[Tensor], places: Sequence[int]) -> None:
    return None
