"""One contender in its own process: trains on request and answers with numbers.

The first request is ``{"experiment": {...}, "contender": NAME}``; then any of those in ``_ANSWERS``.
"""

import time
from collections.abc import Callable
from typing import Any

from fxamp.tools.bench.worker import serve

#: Steps before timing starts: the first compiles, and later ones might recompile.
WARM_UP = 3


def _start(request: dict[str, Any]) -> Any:
    from fxamp.tools.bench.train.contenders import CONTENDERS
    from fxamp.tools.bench.train.experiment import Experiment

    experiment, contender = Experiment(**request["experiment"]), CONTENDERS[request["contender"]]

    import torch

    from fxamp.tools.bench.train.training import Training

    if experiment.device == "cpu":
        torch.set_num_threads(experiment.threads)
    return Training(experiment, contender)


def _warm_up(training: Any) -> dict[str, Any]:
    """Seconds of the call of torch.compile and of each of the first steps, and what Dynamo counted in them."""
    from torch._dynamo.utils import counters

    seconds = [_timed(training, 1) for _ in range(WARM_UP)]
    return {
        "compile_call": training.compile_call,
        "seconds": seconds,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }


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
    }
    return answer | {"observed": observe(training).as_dict()}


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
