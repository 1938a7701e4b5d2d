"""Read the measurements of one graph's runs without waiting for its device, and log, raise or count the findings."""

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from fxamp.errors import NonFiniteError
from fxamp.nonfinite.diagnosis import diagnose
from fxamp.nonfinite.flow import Flow
from fxamp.nonfinite.origins import Readings
from fxamp.reports.nonfinite import NonFinite

log = logging.getLogger(__name__)

#: The number of later runs after which the host waits for a run's numbers.
_PATIENCE = 2


@dataclass(frozen=True)
class _Copy:
    """Numbers on their way to the host, complete once ``event`` has occurred; None if they are complete already."""

    flow: Flow
    numbers: Tensor
    event: Any
    step: int
    backward: bool


class Monitor:
    """Watches one graph. ``mode``: "log" or "raise"; ``scaled``: its backward multiplies gradients by a loss scale.

    Calls of the graph are numbered from 1. Normally nothing waits for a device: numbers on a CPU are read at once,
    others when their copy is complete, at the latest two calls later.
    """

    def __init__(self, mode: str, scaled: bool) -> None:
        self.mode, self.scaled = mode, scaled
        self.forward: Flow | None = None
        self._step = 0
        self._alarmed = 0
        self._copies: deque[_Copy] = deque()
        self._before: dict[Flow, Sequence[float]] = {}
        self._found: dict[tuple[str, str], NonFinite] = {}
        self._lock = RLock()

    def begin(self) -> None:
        """Begin a call of the graph. In mode "raise" raises NonFiniteError for an earlier one."""
        self._step += 1
        self._read(_PATIENCE)

    def take(self, flow: Flow, numbers: Tensor, backward: bool = False) -> None:
        """Take a run's numbers, float32 or float64 ``[flow.numbers]``; read what is complete, as :meth:`begin` does."""
        event = None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            numbers, event = host.copy_(numbers, non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream())
        self._copies.append(_Copy(flow, numbers, event, self._step, backward))
        self._read(_PATIENCE)

    def found(self) -> tuple[NonFinite, ...]:
        """Return the findings so far, in the order of their first occurrence; waits for the device."""
        with suppress(NonFiniteError):  # it is among what was found
            self._read(0)
        return tuple(self._found.values())

    def _read(self, patience: int) -> None:
        """Read the numbers that have arrived, and wait for those of more than ``patience`` calls ago."""
        with self._lock:
            while self._copies:
                copy = self._copies[0]
                if copy.event is not None and not copy.event.query():
                    if copy.step > self._step - patience:
                        return
                    copy.event.synchronize()
                self._copies.popleft()
                self._judge(copy)

    def _judge(self, copy: _Copy) -> None:
        numbers = copy.numbers.tolist()
        if copy.flow.is_finite(numbers):
            self._before[copy.flow] = numbers
            return
        readings = Readings.of(copy.flow, numbers)
        origin = readings.origin()
        if origin is None:
            self._before[copy.flow] = numbers
            return
        if copy.backward and self._alarmed == copy.step:
            return  # the backward of a forward that was not finite
        self._alarmed = copy.step
        earlier = self._before.get(copy.flow)
        before = None if earlier is None else Readings.of(copy.flow, earlier)
        forward = None
        if copy.backward and self.forward is not None:  # it was finite, or its backward would have been skipped above
            forward = Readings.of(self.forward, self._before.get(self.forward, [0.0] * self.forward.numbers))
        self._note(diagnose(readings, origin, copy.step, before, forward, self.scaled and copy.backward))

    def _note(self, found: NonFinite) -> None:
        """Store a finding; log it if it is the first of its kind, or raise it each time in mode "raise"."""
        key = found.region, found.node
        known = self._found.get(key)
        if known is None:
            self._found[key] = found
        else:
            self._found[key] = replace(known, times=known.times + 1, last=found.step)
        if found.scaled:
            return
        if self.mode == "raise":
            raise NonFiniteError(str(found), found)
        if known is None:
            log.warning("%s", found)
