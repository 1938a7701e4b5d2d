"""One contender in its own process: steps on request.

The first request is ``{"setup": {...}, "contender": NAME}``; then any of those in ``_ANSWERS``.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from fxamp.tools.bench.worker import serve

#: Steps before timing starts: one makes the state, one compiles, and one would compile again.
WARM_UP = 3


def _start(request: dict[str, Any]) -> Callable[[], None]:
    """Parameters with gradients, and what steps them and waits for the device."""
    import torch

    from fxamp.tools.bench.step.contenders import CONTENDERS
    from fxamp.tools.bench.step.setup import Setup

    setup = Setup(**request["setup"])
    torch.set_num_threads(setup.threads)
    own = [torch.nn.Parameter(torch.full(shape, 0.5, device=setup.device)) for shape in setup.shapes()]
    for parameter in own:
        parameter.grad = torch.full_like(parameter, 0.25)
    step = CONTENDERS[request["contender"]].make(own, setup)

    def stepped() -> None:
        step()
        if setup.device == "cuda":
            torch.cuda.synchronize()

    return stepped


def _first_compile(step: Callable[[], None]) -> dict[str, Any]:
    """Seconds of a first torch.compile, of one addition: imports, and Inductor's tests of the C++ compiler."""
    import torch

    seconds, cpu = _timed(lambda: torch.compile(_add_one)(torch.ones(64)), 1)
    return {"seconds": seconds, "cpu": cpu}


def _add_one(x: Any) -> Any:
    return x + 1


def _warm_up(step: Callable[[], None]) -> dict[str, Any]:
    """Seconds of the first steps, which compile."""
    seconds, cpu = _timed(step, WARM_UP)
    return {"seconds": seconds, "cpu": cpu}


def _steps(step: Callable[[], None], count: int) -> dict[str, Any]:
    """The mean seconds of ``count`` steps; one step before them, not timed, warms the caches."""
    step()
    start = time.perf_counter()
    for _ in range(count):
        step()
    return {"seconds": (time.perf_counter() - start) / count}


def _timed(call: Callable[[], object], count: int) -> tuple[float, float]:
    """Seconds of calls: elapsed, and CPU time of this process and of the compilers that it starts."""
    from torch._inductor.async_compile import shutdown_compile_workers

    before, start = os.times(), time.perf_counter()
    for _ in range(count):
        call()
    elapsed = time.perf_counter() - start
    shutdown_compile_workers()  # the time of a child counts when it has ended
    after = os.times()
    return elapsed, sum(after[:4]) - sum(before[:4])


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "first_compile": _first_compile,
    "warm_up": _warm_up,
    "steps": _steps,
}

if __name__ == "__main__":
    raise SystemExit(serve(_start, _ANSWERS))
