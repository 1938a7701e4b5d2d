"""Processes that run programs one by one; one that dies or hangs costs its program, and is replaced.

They are forked from one that has imported torch and fxamp, so that a new one is cheap: none of them gets old.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from programs.search import Shrink, Tally
from programs.strategy import Focus
from support.machines.forked import PRELOADED

#: Programs of one process: what torch keeps of each adds up.
_MOST = 50

#: Seconds for one program.
LIMIT = 600.0

_forkserver = get_context("forkserver")
_spawn = get_context("spawn")  # CUDA cannot be used in a fork of a process that asked for it


@dataclass(frozen=True)
class Task:
    """One program: its number among those of a focus, how it is shrunk if it fails, and the device that runs it."""

    number: int
    focus: Focus
    shrink: Shrink
    device: str = "cpu"


Work = Callable[[Task], Tally]

#: Runs a program without fxamp.
Alone = Callable[[Task], None]


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    work: Work
    alone: Alone
    task: Task | None = None
    since: float = 0.0
    left: int = _MOST

    @classmethod
    def start(cls, work: Work, alone: Alone, device: str) -> "_Worker":
        context = _context(device)
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(work, theirs), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours, work, alone)

    def give(self, task: Task) -> None:
        self.task, self.since, self.left = task, time.monotonic(), self.left - 1
        self.pipe.send(task)

    def take(self) -> Tally | None:
        """The tally of the program that runs; None while it runs.

        A failure if the process died or hangs, unless it dies of a signal without fxamp too.
        """
        try:
            if self.pipe.poll():
                tally: Tally = self.pipe.recv()
                return tally
        except (EOFError, ConnectionError):
            self.process.join()
            self.left = 0
            if self._dies_without_fxamp():
                return Tally(refused=Counter({"torch.compile alone: the process dies": 1}))
            return self._failed(f"the process died with status {self.process.exitcode}")
        if time.monotonic() - self.since < LIMIT:
            return None
        self.left = 0
        return self._failed(f"the program takes longer than {LIMIT:.0f} s")

    def stop(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join()

    def _dies_without_fxamp(self) -> bool:
        assert self.task is not None
        process = _context(self.task.device).Process(target=self.alone, args=(self.task,), daemon=True)
        process.start()
        process.join(LIMIT)
        status = process.exitcode
        process.kill()
        return status is not None and status < 0

    def _failed(self, why: str) -> Tally:
        assert self.task is not None
        tally = Tally(programs=1, numbers=[self.task.number])
        tally.failures[f"{why}: search([{self.task.number}])"] += 1
        return tally


def _context(device: str) -> Any:
    return _forkserver if device == "cpu" else _spawn


def run_all(
    work: Work, alone: Alone, tasks: Sequence[Task], processes: int, until: float
) -> Iterator[tuple[Task, Tally]]:
    """Yield each task with its tally as it ends; none begins after ``until``, of time.monotonic()."""
    _forkserver.set_forkserver_preload([*PRELOADED, "programs.search"])
    waiting = list(reversed(tasks))
    workers = [_Worker.start(work, alone, task.device) for task in tasks[:processes]]
    try:
        while workers:
            for worker in list(workers):
                tally = None if worker.task is None else worker.take()
                if tally is not None:
                    assert worker.task is not None
                    yield worker.task, tally
                    worker.task = None
                if worker.task is None:
                    _continue(worker, workers, waiting if time.monotonic() < until else [])
            wait([worker.pipe for worker in workers], timeout=1.0)
    finally:
        for worker in workers:
            worker.stop()


def _continue(worker: _Worker, workers: list[_Worker], waiting: list[Task]) -> None:
    """Give ``worker`` the next task; replace it if it is worn out, and let it go if nothing is left to do."""
    if worker.left == 0 or not waiting:
        worker.stop()
        workers.remove(worker)
        if not waiting:
            return
        worker = _Worker.start(worker.work, worker.alone, waiting[-1].device)
        workers.append(worker)
    worker.give(waiting.pop())


def _serve(work: Work, pipe: Connection) -> None:
    """Leave what was imported out of garbage collections.

    An error of the search itself names the programs before, one of which may have left torch in a state like no other.
    """
    gc.freeze()
    served: list[int] = []
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            tally = work(task)
        except Exception as error:
            error.add_note(f"this process had run the programs {served}")
            raise
        if tally.refused:  # contexts that an error left in a cycle restore torch's state when they are collected
            gc.collect()
        pipe.send(tally)
        served.append(task.number)
