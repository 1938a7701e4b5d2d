"""The growth of the time of capture and of every pass with the number of ops."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fxamp.capture import capture
from fxamp.passes.base import CastContext
from fxamp.passes.sequences import FORWARD
from fxamp.pipeline import run_passes
from fxamp.policy import Policy
from fxamp.tools.bench.passes.chain import build_chain


@dataclass(frozen=True)
class Timing:
    """CPU seconds of this thread for capture, each pass (its verification included) and all passes, by name.

    CPU time, because elapsed time would include other work on the machine.
    """

    ops: int
    casts: int
    seconds: dict[str, float]

    def per_op(self, name: str) -> float:
        """Seconds for one op of the chain."""
        return self.seconds[name] / self.ops


def time_chain(ops: int, policy: str = "cpu-bfloat16") -> Timing:
    """Build a chain of ``ops`` calls, capture it, and run each pass of the pipeline on it."""
    chain = build_chain(ops)
    resolved = Policy.load(policy).resolve("cpu")
    start = time.thread_time()
    captured = capture(chain.module, chain.inputs)
    seconds = {"capture": time.thread_time() - start}
    context = CastContext(captured.mode, resolved)
    casts = 0
    for step in FORWARD.steps:
        start = time.thread_time()
        [record] = run_passes(captured, context, step)
        seconds[step.name] = time.thread_time() - start
        casts += record.counts.get("inserted", 0)
    seconds["all passes"] = sum(seconds[step.name] for step in FORWARD.steps)
    return Timing(ops, casts, seconds)


def growth(timings: Sequence[Timing]) -> dict[str, float]:
    """Return by name the time per op in the last chain over that in the first: 1 if time grows linearly."""
    first, last = timings[0], timings[-1]
    return {name: last.per_op(name) / first.per_op(name) for name in first.seconds}
