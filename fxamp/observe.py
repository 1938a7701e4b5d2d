"""Let a tool observe the library's work without changing it.

@contextmanager
def observer(event: Event) -> Iterator[None]:
    start = time.perf_counter()
    yield                                   # the work is done here
    print(event, time.perf_counter() - start)

with observing(observer):
    compiled(x).sum().backward()
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CompileStage:
    """A stage of the backend's work on one graph: "capture", "passes" or "lowering"."""

    name: str


@dataclass(frozen=True, eq=False)
class GradientCheck:
    """A check of ``gradients`` for inf and NaN outside graphs; ``in_place``: it also unscales them."""

    gradients: "Sequence[Tensor]"
    in_place: bool


@dataclass(frozen=True)
class CompiledStep:
    """A call of a compiled optimizer step.

    ``source``: the code that Inductor or fxamp generated; None without either. ``elements``: the number of elements of
    all its parameters, if the source is for tensors of any size; None if it is for fixed sizes.
    """

    source: str | None
    elements: int | None = None


Event = CompileStage | GradientCheck | CompiledStep
"""A piece of the library's work."""

Observer = Callable[[Event], AbstractContextManager[None]]
"""Called when the work starts; the returned context is entered then, and exited when the work ends."""

#: Process-wide, because autograd calls compiled backwards in its own threads.
_observers: list[Observer] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Pass every event that starts inside this context, in any thread, to ``observer``."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def observed(event: Event) -> AbstractContextManager[None]:
    """Return the context for the library to do the work that ``event`` describes."""
    return _entered(event) if _observers else nullcontext()


@contextmanager
def _entered(event: Event) -> Iterator[None]:
    with ExitStack() as stack:
        for observer in tuple(_observers):
            stack.enter_context(observer(event))
        yield
