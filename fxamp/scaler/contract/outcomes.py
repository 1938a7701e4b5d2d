"""Whether steps were taken: a flag on the device, and the outcomes that the host knows so far without waiting."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from fxamp.torch_devices import copy_across_, on_device

KEPT = 256
"""Maximum number of outcomes kept until the host asks for them."""


@dataclass(frozen=True, eq=False)
class _Travelling:
    """A flag being copied to the host: ready when ``event`` has completed; at once if ``event`` is None."""

    host: Tensor
    event: torch.cuda.Event | None

    def arrived(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def read(self) -> bool:
        # Read through numpy: the value is already in host memory, and ``item`` could wait for the device.
        return bool(self.host.numpy()[()])


class Outcomes:
    """Records every step; schedulers read it."""

    def __init__(self) -> None:
        self._stepped: Tensor | None = None
        self._queue: deque[bool | _Travelling] = deque(maxlen=KEPT)

    def record(self, skipped: bool | Tensor, device: torch.device) -> None:
        """Record a step's outcome: a bool, or a 0-dim tensor that is nonzero for a skip."""
        with on_device(device):
            self._record(skipped, device)

    def _record(self, skipped: bool | Tensor, device: torch.device) -> None:
        if self._stepped is None or self._stepped.device != device:
            self._stepped = torch.ones((), dtype=torch.bool, device=device)
        if isinstance(skipped, bool):
            self._stepped.fill_(not skipped)
            self._queue.append(not skipped)
            return
        # Write in place: a replayed CUDA graph writes to the memory that the user holds.
        copy_across_(self._stepped, skipped == 0)
        if device.type != "cuda":
            self._queue.append(_Travelling(self._stepped.to("cpu", copy=True), None))
            return
        if torch.cuda.is_current_stream_capturing():
            return
        host = torch.empty((), dtype=torch.bool, pin_memory=True)
        host.copy_(self._stepped, non_blocking=True)  # read once the event says that it has arrived
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._queue.append(_Travelling(host, event))

    @property
    def stepped(self) -> Tensor | None:
        """Whether the last step was taken, 0-dim bool on the device; None before the first step."""
        return self._stepped

    def poll(self) -> list[bool]:
        """Return the outcomes that have arrived, oldest first, and remove them."""
        found = []
        while self._queue:
            first = self._queue[0]
            if isinstance(first, _Travelling) and not first.arrived():
                break
            self._queue.popleft()
            found.append(first if isinstance(first, bool) else first.read())
        return found
