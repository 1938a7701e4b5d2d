"""The process in which checks run: a kernel that crashes ends this process, and not the answer.

The first request is ``{"device": ..., "lowering": ...}``; each other one runs the check at an index.
"""

import time
from typing import Any

from fxamp.tools.bench.check.listing import checks
from fxamp.tools.bench.check.outcome import OK, SKIPPED, WRONG, Check, SkippedError
from fxamp.tools.bench.worker import serve


def _start(request: dict[str, Any]) -> list[Check]:
    return checks(**request)


def _run(every: list[Check], at: int) -> dict[str, Any]:
    """Run one check. Whatever it raises is the answer, for that is what a check is for."""
    check, start = every[at], time.perf_counter()
    try:
        status, detail = OK, check.run()
    except SkippedError as error:
        status, detail = SKIPPED, str(error)
    except AssertionError as error:
        status, detail = WRONG, str(error)
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        status, detail = WRONG, f"{type(error).__name__}: {first}"
    return {"name": check.name, "status": status, "detail": detail, "seconds": time.perf_counter() - start}


def _speed(every: list[Check], device: str, parameters: int, rounds: int) -> dict[str, Any]:
    """Time the kernels, beside the counted bound of the GPU if that is known."""
    from fxamp.tools.bench.check.bandwidth import documents, known_gpu, speeds
    from fxamp.tools.common.machine import machine

    gpu = known_gpu(machine(device, 1)["device"]) if device == "cuda" else None
    return {"rows": documents(speeds(device, parameters, rounds, gpu))}


if __name__ == "__main__":
    raise SystemExit(serve(_start, {"check": _run, "speed": _speed}))
