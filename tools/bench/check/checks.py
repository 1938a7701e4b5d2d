"""All checks, and the process that runs them: a kernel that crashes ends that process, not the command."""

import time
from typing import Any

from fxamp.tools.bench.check.check_line import OK, SKIPPED, WRONG, Check, Outcome, SkippedError
from fxamp.tools.bench.check.gradients import gradient_checks
from fxamp.tools.bench.check.kernels import kernel_checks
from fxamp.tools.bench.check.training import training_checks
from fxamp.tools.common.silence import one_line


def checks(device: str, lowering: str) -> list[Check]:
    """Return the checks of ``device``, "cpu" or "cuda", with compiled graphs of ``lowering``.

    Cheap and informative checks come first.
    """
    return [*kernel_checks(device), *training_checks(device, lowering), *gradient_checks(device, lowering)]


def run_check(every: list[Check], at: int) -> Outcome:
    """Run one check. Every exception is an outcome."""
    check, start = every[at], time.perf_counter()
    try:
        status, detail = OK, check.run()
    except SkippedError as error:
        status, detail = SKIPPED, str(error)
    except AssertionError as error:
        status, detail = WRONG, str(error)
    except Exception as error:
        status, detail = WRONG, one_line(error)
    return Outcome(check.name, status, detail, time.perf_counter() - start)


def speed(every: list[Check], device: str, parameters: int, rounds: int) -> list[dict[str, Any]]:
    """Time the kernels, and add the counted bound of the GPU if that is known."""
    from fxamp.tools.bench.check.bandwidth import known_gpu, speeds
    from fxamp.tools.common.machine import machine

    gpu = known_gpu(machine(device, 1)["device"]) if device == "cuda" else None
    return speeds(device, parameters, rounds, gpu)
