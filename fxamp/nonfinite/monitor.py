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


@dataclass(eq=False)
class Call:
    """A call of a graph, with its backward: its number, whether it raised an alarm; if not, its forward's numbers."""

    step: int
    alarmed: bool = False
    forward: Sequence[float] | None = None


@dataclass(frozen=True)
class _Copy:
    """Numbers on their way to the host, complete once ``event`` has occurred; None if they are complete already."""

    call: Call
    flow: Flow
    numbers: Tensor
    event: Any
    backward: bool


class Monitor:
    """Watches one graph. ``mode``: "log" or "raise"; ``scaled``: its backward multiplies gradients by a loss scale.

    Calls of the graph are numbered from 1. Normally nothing waits for a device: numbers on a CPU are read at once,
    others when their copy is complete, at the latest two calls later.
    """

    def __init__(self, mode: str, scaled: bool) -> None:
        self.mode, self.scaled = mode, scaled
        self.forward: Flow | None = None
        self._newest = Call(0)
        self._copies: deque[_Copy] = deque()
        self._before: dict[Flow, Sequence[float]] = {}
        self._found: dict[tuple[str, str], NonFinite] = {}
        self._lock = RLock()

    def begin(self) -> Call:
        """Begin a call of the graph. In mode "raise" raises NonFiniteError for an earlier one."""
        call = self._newest = Call(self._newest.step + 1)
        self._read(_PATIENCE)
        return call

    def take(self, call: Call | None, flow: Flow, numbers: Tensor, backward: bool = False) -> None:
        """Take the numbers of a run of ``call``, None for the newest; read what is complete, as :meth:`begin` does.

        ``numbers``: float32 or float64 ``[flow.numbers]``.
        """
        event = None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            numbers, event = host.copy_(numbers, non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream())
        self._copies.append(_Copy(call or self._newest, flow, numbers, event, backward))
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
                    if copy.call.step > self._newest.step - patience:
                        return
                    copy.event.synchronize()
                self._copies.popleft()
                self._judge(copy)

    def _judge(self, copy: _Copy) -> None:
        numbers, call = copy.numbers.tolist(), copy.call
        readings = None if copy.flow.is_finite(numbers) else Readings.of(copy.flow, numbers)
        origin = None if readings is None else readings.origin()
        if readings is None or origin is None:
            self._before[copy.flow] = numbers
            call.forward = call.forward if copy.backward else numbers
            return
        if copy.backward and call.alarmed:
            return  # the backward of a forward that was not finite
        call.alarmed = True
        earlier = self._before.get(copy.flow)
        before = None if earlier is None else Readings.of(copy.flow, earlier)
        forward = None
        if copy.backward and self.forward is not None:  # it was finite, or its backward would have been skipped above
            forward = Readings.of(self.forward, call.forward or [0.0] * self.forward.numbers)
        self._note(diagnose(readings, origin, call.step, before, forward, self.scaled and copy.backward))

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
