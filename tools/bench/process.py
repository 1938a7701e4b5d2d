"""The parent's side of a process that measures: its worker is in :mod:`fxamp.tools.bench.worker`."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class ContenderFailed(Exception):
    """A contender's process failed; the message says why in one line."""


class Process:
    """A new interpreter that runs ``module`` as a worker; use it as a context manager, or close it.

    ``first`` is its first request; ``cache`` is the folder of Inductor's and Triton's caches: an empty one for a cold
    start. Raises ContenderFailed if the process cannot answer a request.
    """

    def __init__(self, module: str, first: Mapping[str, Any], cache: Path) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=_environment(cache),
            start_new_session=True,  # Ctrl-C ends the rounds, not the worker in the middle of an answer
        )
        try:
            self._exchange(first)
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Send the worker a task and wait for the answer."""
        return self._exchange({"do": what, "with": arguments})

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ContenderFailed(f"its process ended: {self._last_error()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContenderFailed(answer["error"])
        return answer

    def _last_error(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"status {status}" + (f", {lines[-1]}" if lines else "")


def _environment(cache: Path) -> dict[str, str]:
    """Return this process's environment with separate caches and a path to this copy of fxamp."""
    import fxamp

    home = str(Path(fxamp.__file__).parent.parent)
    paths = [home, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    own = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
