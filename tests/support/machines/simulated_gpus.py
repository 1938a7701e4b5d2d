"""CUDA devices that are not there: which one is current is recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class SimulatedGpus:
    """Stands in for torch.cuda's current device, streams and events.

    ``asked``: what was asked or done, each with the device that was current then, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.asked: list[tuple[str, int]] = []
        own = self

        class Event:
            def record(self) -> None:
                own.note("event")

            def query(self) -> bool:
                return True

        stands_in: dict[str, Any] = {
            "device": self._device,
            "Event": Event,
            "is_current_stream_capturing": lambda: self.note("capturing"),
            "current_stream": lambda device=None: SimpleNamespace(cuda_stream=self.note("stream") or 0),
        }
        for name, value in stands_in.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def note(self, what: str) -> bool:
        """Record the current device; return False, an answer to any question."""
        self.asked.append((what, self.current))
        return False

    @contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        try:
            yield
        finally:
            self.current = before
