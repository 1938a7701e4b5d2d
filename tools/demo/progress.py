"""Shows progress: one live line on a terminal, occasional plain lines elsewhere."""

import time
from types import TracebackType
from typing import Self, TextIO


class Progress:
    """Progress of ``total`` steps of one kind, written to ``stream``; use it as a context manager.

    On a terminal a line is rewritten in place, ten times a second at most. Elsewhere about ten lines are written.
    """

    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self._label = label
        self._total = total
        self._stream = stream
        self._live = stream.isatty()
        self._shown = -float("inf")

    def __enter__(self) -> Self:
        self.say(f"{self._label}: compiling ...")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._stream.write("\n")
            self._stream.flush()

    def step(self, done: int, loss: float) -> None:
        """Tell that ``done`` steps of the total are finished, the last with ``loss``."""
        last = done == self._total
        if self._live and not last and time.monotonic() - self._shown < 0.1:
            return
        if not self._live and not last and done % max(1, self._total // 10):
            return
        self._shown = time.monotonic()
        self.say(f"{self._label}: step {done}/{self._total}, loss {loss:.3f}")

    def say(self, text: str) -> None:
        """Show ``text`` as the current state."""
        self._stream.write(f"\r\x1b[K{text}" if self._live else f"{text}\n")
        self._stream.flush()
