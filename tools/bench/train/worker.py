"""One contender in its own process: what is called there."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from fxamp.tools.bench.train.experiment import PARAMETERS, Experiment

#: Steps before timing starts: the first compiles, and later ones might recompile.
WARM_UP = 3


def start(experiment: Experiment, name: str) -> Any:
    """Make the training of the contender called ``name``."""
    contender = experiment.contenders[name]

    import torch

    if experiment.device == "cpu":
        torch.set_num_threads(experiment.threads)
    if experiment.model == PARAMETERS:
        from fxamp.tools.bench.train.stepping import Stepping

        return Stepping(experiment, contender)
    from fxamp.tools.bench.train.training import Training

    return Training(experiment, contender)


def warm_up(training: Any) -> dict[str, Any]:
    """Seconds of the call of torch.compile and of each of the first steps, and what torch counted in them.

    ``cpu``: CPU time of this process so far and of the compilers that it started. ``hits``, ``misses``: of graphs in
    torch's compile caches.
    """
    from fxamp.torch_private.parts.dynamo import counters

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
    from fxamp.torch_private.parts.dynamo import counters

    return int(counters["aot_autograd"][f"autograd_cache_{outcome}"] + counters["inductor"][f"fxgraph_cache_{outcome}"])


def _cpu_seconds() -> float:
    if "torch._inductor.async_compile" in sys.modules:
        from fxamp.torch_private.parts.inductor import shutdown_compile_workers

        shutdown_compile_workers()  # the time of a child counts when it has ended
    return sum(os.times()[:4])


def steps(training: Any, count: int) -> dict[str, Any]:
    """Return the mean seconds of ``count`` steps, elapsed and of this process's CPU time.

    One step before them warms the caches. ``host_seconds``: of its calls on an idle device, without waiting for it.
    """
    training.wait()
    start = time.perf_counter()
    training.step()
    host, before = time.perf_counter() - start, time.process_time()
    elapsed = _timed(training, count)
    spent = time.process_time() - before
    return {"seconds": elapsed / count, "cpu_seconds": spent / count, "host_seconds": host}


def end(training: Any, reference: Path | None) -> dict[str, Any]:
    """Return losses, loss scale and compiled graphs so far, then the counts of further steps: fields of ``Measured``.

    ``reference``: a file with the gradient in float64, with which that of the first weights is compared at the end.
    """
    from fxamp.tools.bench.train.gradient import gradient_error
    from fxamp.tools.bench.train.observe import observe
    from fxamp.torch_private.parts.dynamo import counters

    answer = {
        "losses": tuple(training.losses),
        "loss_scale": training.loss_scale,
        "graphs": counters["stats"]["unique_graphs"],
        "notes": tuple(training.notes),
    }
    answer["observed"] = observe(training)
    return answer | {"gradient_error": None if reference is None else gradient_error(training, reference)}


def _timed(training: Any, count: int) -> float:
    training.wait()
    start = time.perf_counter()
    for _ in range(count):
        training.step()
    training.wait()
    return time.perf_counter() - start
