"""Time several pieces of work in turn, on the device's own clock where it has one."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fxamp.tools.bench.spread import Spread, spread

#: A timed stretch lasts this long at least: the clocks' own error is then below a thousandth.
_LEAST = 0.01


def time_in_turn(work: Mapping[str, Callable[[], object]], device: str, rounds: int) -> dict[str, Spread]:
    """Seconds of each piece of work, by name: median and quartiles of ``rounds``, each of which does all of it in turn.

    What is too short to time is done several times in a row. On cuda seconds are between two CUDA events.
    """
    clock = _cuda_seconds if device == "cuda" else _seconds
    repeats = {name: _repeats(run, clock) for name, run in work.items()}
    samples: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, run in work.items():
            samples[name].append(clock(run, repeats[name]) / repeats[name])
    return {name: spread(values) for name, values in samples.items()}


_Clock = Callable[[Callable[[], object], int], float]


def _repeats(run: Callable[[], object], clock: _Clock) -> int:
    """How often to do it for a stretch that is long enough; the first calls compile and fill caches."""
    clock(run, 3)
    return max(1, round(_LEAST / max(clock(run, 1), 1e-9)))


def _seconds(run: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        run()
    return time.perf_counter() - start


def _cuda_seconds(run: Callable[[], object], count: int) -> float:
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
