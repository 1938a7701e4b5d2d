"""Ctrl-C in long work: what was found until then is printed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SoFar(KeyboardInterrupt):
    """Ctrl-C ended the work; ``text`` is what was found until then, which the command prints."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


@contextmanager
def so_far(text: Callable[[], str]) -> Iterator[None]:
    """If Ctrl-C ends the work inside, raise SoFar with ``text()``, followed by what that work found itself."""
    try:
        yield
    except KeyboardInterrupt as error:
        parts = [part for part in (text(), error.text if isinstance(error, SoFar) else "") if part]
        raise SoFar("\n".join(parts)) if parts else KeyboardInterrupt from error
