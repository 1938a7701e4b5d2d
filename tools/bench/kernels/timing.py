"""Times several pieces of work in turn, with the device's own clock if it has one."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fxamp.tools.bench.spread import Spread, spread

#: The least seconds of a timed stretch: the error of the clocks is then below a thousandth.
_LEAST = 0.01


def time_in_turn(work: Mapping[str, Callable[[], object]], device: str, rounds: int) -> dict[str, Spread]:
    """Return the seconds of each piece of work by name: median and quartiles over ``rounds``, which do all in turn.

    Short work is repeated within a round. On cuda the seconds are those between two CUDA events.
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
    """Return how often to repeat the work in one stretch; the first calls compile and fill caches."""
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
