"""Processes that need not import torch and fxamp, which takes seconds: they are forked from one that has."""

import contextlib
import io
import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.nn.parallel",
    "fxamp.backend.entry_point",
    "fxamp.scaler",
]

_CONTEXT = multiprocessing.get_context("forkserver")


def preload() -> None:
    """Say what the process that others are forked from imports as it starts."""
    _CONTEXT.set_forkserver_preload(PRELOADED)


def printed_by(file: str, *arguments: str) -> list[str]:
    """Return the lines that ``python FILE ARGUMENTS`` prints. Raises RuntimeError with its traceback if it fails."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _start(_run_file, sender, file, arguments)
    sender.close()
    printed, failed = receiver.recv()
    process.join()
    if failed:
        raise RuntimeError(failed)
    lines: list[str] = printed.splitlines()
    return lines


class ForkedWorker:
    """In place of the ``subprocess.Popen`` of ``python -m MODULE`` with pipes to its stdin and stdout."""

    def __init__(self, command: Sequence[str], *, stderr: Any, env: Mapping[str, str], **_: Any) -> None:
        assert list(command[:-1]) == [sys.executable, "-m"]
        requests, to_worker = _CONTEXT.Pipe(duplex=False)
        from_worker, answers = _CONTEXT.Pipe(duplex=False)
        errors = Connection(os.dup(stderr.fileno()), readable=False)
        self._process = _start(_run_module, command[-1], dict(env), requests, answers, errors)
        for theirs in (requests, answers, errors):
            theirs.close()
        self.stdin, self.stdout = (
            os.fdopen(os.dup(to_worker.fileno()), "wb"),
            os.fdopen(os.dup(from_worker.fileno()), "rb"),
        )

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def communicate(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        self.wait()


def _start(run: Callable[..., None], *arguments: Any) -> BaseProcess:
    preload()
    process = _CONTEXT.Process(target=run, args=arguments, daemon=True)
    process.start()
    return process


def _run_file(sender: Connection, file: str, arguments: Sequence[str]) -> None:
    sys.argv, failed, printed = [file, *arguments], "", io.StringIO()
    sys.path.insert(0, str(Path(file).parent))
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(file, run_name="__main__")
    except BaseException:
        failed = traceback.format_exc()
    sender.send((printed.getvalue(), failed))


def _run_module(module: str, environment: Mapping[str, str], *streams: Connection) -> None:
    for descriptor, stream in enumerate(streams):
        os.dup2(stream.fileno(), descriptor)
    sys.argv, sys.stdin = [module], os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    runpy.run_module(module, run_name="__main__")
