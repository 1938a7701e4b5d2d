"""Run checks in several processes at once: each runs one check after another, and one that dies is replaced."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from fxamp.tools.bench.check.check_line import WRONG, Outcome
from fxamp.tools.bench.check.checks import run_check
from fxamp.tools.bench.process import ContenderFailed, Process

#: With more processes, most would compile what another one has compiled.
_MOST = 4


def processes() -> int:
    """Return how many processes this machine's processors keep busy, at most four."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(own, _MOST)


def _taken(waiting: deque[int]) -> int | None:
    """Take the first one; None if there is none. Several threads may call it at once."""
    try:
        return waiting.popleft()
    except IndexError:
        return None


def outcomes(names: Sequence[str], chosen: Sequence[int], start: Callable[[], Process], jobs: int) -> Iterator[Outcome]:
    """Yield the outcome of each chosen check as it arrives; a check that ends its process is not ok.

    Args:
        names: of all checks.
        chosen: the indices of those to run, in order.
        start: opens a process whose object is the list of checks.
        jobs: how many processes work at once.
    """
    waiting, running = deque(chosen), list[Process]()
    arrived = SimpleQueue[Outcome | BaseException]()

    def work() -> None:
        process: Process | None = None
        try:
            while (at := _taken(waiting)) is not None:
                try:
                    if process is None:
                        running.append(process := start())
                    arrived.put(process.ask(run_check, at=at))
                except ContenderFailed as ended:
                    arrived.put(Outcome(names[at], WRONG, str(ended), 0.0))
                    if process is not None:
                        process.close()
                    process = None
        except BaseException as error:
            arrived.put(error)
        finally:
            if process is not None:
                process.close()

    with ThreadPoolExecutor(jobs) as pool:
        for _ in range(min(jobs, len(chosen))):
            pool.submit(work)
        try:
            for _ in chosen:
                outcome = arrived.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            waiting.clear()
            for process in running:
                process.kill()
