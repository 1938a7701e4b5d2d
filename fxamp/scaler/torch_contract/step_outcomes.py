"""Which steps were taken: the count of skips, a flag on the device, outcomes that the host knows without waiting."""

from collections import deque
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from fxamp.torch_devices import copy_across_, known, on_device

MOST_OUTCOMES = 256
"""Maximum number of outcomes stored until the host asks for them."""


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
    """Records every step; schedulers read it. ``skipped_steps``: how many were skipped before the first one."""

    def __init__(self, skipped_steps: int = 0) -> None:
        self._skipped_steps = skipped_steps
        self._skipped_on_device: Tensor | None = None
        self._stepped: Tensor | None = None
        self._written: bool | None = None  # to _stepped, by the host
        self._queue: deque[bool | _Travelling] = deque(maxlen=MOST_OUTCOMES)
        self._arrivals = torch.empty(0, dtype=torch.bool, device="cpu")  # pinned, with a place for each in the queue
        self._places = count()

    def record(self, skipped: bool | Tensor, device: torch.device) -> None:
        """Record a step's outcome: a bool, or a 0-dim tensor that is nonzero for a skip."""
        if isinstance(skipped, Tensor) and (decided := known(skipped)) is not None:
            skipped = decided
        if self._stepped is None or self._stepped.device != device:
            self._stepped = torch.ones((), dtype=torch.bool, device=device)
            self._written = True if self._stepped.is_cpu else None  # a replayed CUDA graph writes too
        if isinstance(skipped, bool):
            self._skipped_steps += skipped
            if self._written is not (not skipped):
                self._stepped.fill_(not skipped)
                self._written = not skipped if self._stepped.is_cpu else None
            self._queue.append(not skipped)
            return
        self._written = None
        overflowed = skipped != 0
        self._count(overflowed)
        with on_device(device):
            self._queue_outcome(overflowed, self._stepped)

    def _count(self, skipped: Tensor) -> None:
        if self._skipped_on_device is None or self._skipped_on_device.device != skipped.device:
            self._skipped_steps = self.skipped_steps
            self._skipped_on_device = torch.zeros((), dtype=torch.int64, device=skipped.device)
        # Add in place: a replayed CUDA graph adds to the same memory.
        self._skipped_on_device.add_(skipped)

    def _queue_outcome(self, skipped: Tensor, stepped: Tensor) -> None:
        # Write in place: a replayed CUDA graph writes to the memory that the user holds.
        if skipped.device == stepped.device:
            torch.logical_not(skipped, out=stepped)
        else:
            copy_across_(stepped, ~skipped)
        if stepped.device.type != "cuda":
            self._queue.append(_Travelling(stepped.to("cpu", copy=True), None))
            return
        if torch.cuda.is_current_stream_capturing():
            return
        host = self._place()
        host.copy_(stepped, non_blocking=True)  # read once the event says that it has arrived
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._queue.append(_Travelling(host, event))

    def _place(self) -> Tensor:
        """Return pinned memory for an outcome, 0-dim bool; it is reused when the outcome has left the queue."""
        if not len(self._arrivals):
            self._arrivals = torch.empty(MOST_OUTCOMES, dtype=torch.bool, device="cpu", pin_memory=True)
        return self._arrivals[next(self._places) % MOST_OUTCOMES]

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps; waits for the device if the host does not know all outcomes yet."""
        return self._skipped_steps + (0 if self._skipped_on_device is None else int(self._skipped_on_device.item()))

    @property
    def stepped(self) -> Tensor | None:
        """Whether the last step was taken, 0-dim bool on the device; None before the first step."""
        return self._stepped

    def poll(self) -> list[bool]:
        """Return the outcomes that have arrived, oldest first, and remove them."""
        outcomes = []
        while self._queue:
            first = self._queue[0]
            if isinstance(first, _Travelling) and not first.arrived():
                break
            self._queue.popleft()
            outcomes.append(first if isinstance(first, bool) else first.read())
        return outcomes
