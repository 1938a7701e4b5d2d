"""One contender in its own process: trains on request and answers with numbers.

The first request is ``{"experiment": {...}, "contender": NAME}``; then any of those in ``_ANSWERS``.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from fxamp.tools.bench.process import serve

#: Steps before timing starts: the first compiles, and later ones might recompile.
WARM_UP = 3


def _start(request: dict[str, Any]) -> Any:
    from fxamp.tools.bench.train.experiment import PARAMETERS, Experiment

    experiment = Experiment(**request["experiment"])
    contender = experiment.contenders[request["contender"]]

    import torch

    if experiment.device == "cpu":
        torch.set_num_threads(experiment.threads)
    if experiment.model == PARAMETERS:
        from fxamp.tools.bench.train.stepping import Stepping

        return Stepping(experiment, contender)
    from fxamp.tools.bench.train.training import Training

    return Training(experiment, contender)


def _warm_up(training: Any) -> dict[str, Any]:
    """Seconds of the call of torch.compile and of each of the first steps, and what torch counted in them.

    ``cpu``: CPU time of this process until now and of the compilers that it started. ``hits``, ``misses``: of graphs in
    torch's compile caches.
    """
    from torch._dynamo.utils import counters

    seconds = [_timed(training, 1) for _ in range(WARM_UP)]
    return {
        "compile_call": training.compile_call,
        "seconds": seconds,
        "cpu": _cpu_seconds(),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "hits": _in_caches("hit"),
        "misses": _in_caches("miss") + _in_caches("bypass"),
    }


def _in_caches(outcome: str) -> int:
    """How often AOTAutograd's and Inductor's cache had this outcome."""
    from torch._dynamo.utils import counters

    return int(counters["aot_autograd"][f"autograd_cache_{outcome}"] + counters["inductor"][f"fxgraph_cache_{outcome}"])


def _cpu_seconds() -> float:
    if "torch._inductor.async_compile" in sys.modules:
        from torch._inductor.async_compile import shutdown_compile_workers

        shutdown_compile_workers()  # the time of a child counts when it has ended
    return sum(os.times()[:4])


def _steps(training: Any, count: int) -> dict[str, Any]:
    """Return the mean seconds of ``count`` steps, elapsed and of this process's CPU time.

    One step before them, not timed, warms the caches.
    """
    training.step()
    before = time.process_time()
    elapsed = _timed(training, count)
    return {"seconds": elapsed / count, "cpu": (time.process_time() - before) / count}


def _observe(training: Any) -> dict[str, Any]:
    """Return losses, loss scale and compiled graphs so far, then the counts of further steps."""
    from torch._dynamo.utils import counters

    from fxamp.tools.bench.train.observe import observe

    answer = {
        "losses": training.losses,
        "loss_scale": training.loss_scale,
        "graphs": counters["stats"]["unique_graphs"],
        "notes": training.notes,
    }
    return answer | {"observed": observe(training)}


def _timed(training: Any, count: int) -> float:
    training.wait()
    start = time.perf_counter()
    for _ in range(count):
        training.step()
    training.wait()
    return time.perf_counter() - start


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {"warm_up": _warm_up, "steps": _steps, "observe": _observe}

if __name__ == "__main__":
    raise SystemExit(serve(_start, _ANSWERS))
