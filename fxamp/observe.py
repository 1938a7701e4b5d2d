"""Lets a tool watch the library at work, without changing it.

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
    """A part of what the backend does with one graph: "capture", "passes" or "lowering"."""

    name: str


@dataclass(frozen=True, eq=False)
class GradientCheck:
    """A check of ``gradients`` for inf and NaN outside of graphs; ``in_place``: it unscales them too."""

    gradients: "Sequence[Tensor]"
    in_place: bool


@dataclass(frozen=True)
class CompiledStep:
    """A call of a compiled optimizer step.

    ``source``: what Inductor, or fxamp, generated for it; None without either. ``elements``: how many elements all its
    parameters have together, where the source is for tensors of any size; None where it is for those of fixed sizes.
    """

    source: str | None
    elements: int | None = None


Event = CompileStage | GradientCheck | CompiledStep
"""A piece of the library's work."""

Observer = Callable[[Event], AbstractContextManager[None]]
"""Called as the work begins; the context that it returns is entered then, and left as the work ends."""

#: Of the whole process: autograd calls compiled backwards in threads of its own.
_observers: list[Observer] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Show ``observer`` every event that begins inside, from any thread."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def observed(event: Event) -> AbstractContextManager[None]:
    """Return the context in which the library does the work that ``event`` describes."""
    return _entered(event) if _observers else nullcontext()


@contextmanager
def _entered(event: Event) -> Iterator[None]:
    with ExitStack() as stack:
        for observer in tuple(_observers):
            stack.enter_context(observer(event))
        yield
