"""Whether steps were taken: a flag on the device, and what of it has arrived on the host, which never waits for it."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

KEPT = 256
"""Outcomes kept for a host that does not ask."""


@dataclass(frozen=True, eq=False)
class _Travelling:
    """A flag on its way to the host: there once ``event`` has happened, at once where there is none."""

    host: Tensor
    event: torch.cuda.Event | None

    def arrived(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def read(self) -> bool:
        # Through numpy: host memory that has arrived is no reason to wait for a device.
        return bool(self.host.numpy()[()])


class Outcomes:
    """Told of every step; read by schedulers."""

    def __init__(self) -> None:
        self._stepped: Tensor | None = None
        self._queue: deque[bool | _Travelling] = deque(maxlen=KEPT)

    def record(self, skipped: bool | Tensor, device: torch.device) -> None:
        """Take a step's outcome: a bool, or a 0-dim tensor on the device that is nonzero for a skip."""
        if self._stepped is None or self._stepped.device != device:
            self._stepped = torch.ones((), dtype=torch.bool, device=device)
        if isinstance(skipped, bool):
            self._stepped.fill_(not skipped)
            self._queue.append(not skipped)
            return
        # In place: a replayed CUDA graph writes to the memory that the user holds.
        self._stepped.copy_(skipped == 0, non_blocking=True)
        if device.type != "cuda":
            self._queue.append(_Travelling(self._stepped.to("cpu", copy=True), None))
            return
        if torch.cuda.is_current_stream_capturing():
            return
        host = torch.empty((), dtype=torch.bool, pin_memory=True)
        host.copy_(self._stepped, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._queue.append(_Travelling(host, event))

    @property
    def stepped(self) -> Tensor | None:
        """0-dim bool on the device: whether the last step was taken; None before the first."""
        return self._stepped

    def poll(self) -> list[bool]:
        """Return and forget the outcomes that have arrived, oldest first."""
        found = []
        while self._queue:
            first = self._queue[0]
            if isinstance(first, _Travelling) and not first.arrived():
                break
            self._queue.popleft()
            found.append(first if isinstance(first, bool) else first.read())
        return found
