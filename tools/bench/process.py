"""A process that measures: both sides of it.

The child reads one JSON object a line from stdin, and writes one for each to where stdout was; anything else that is
printed goes to stderr. The first object says what to measure, and is answered by {}; every other one is
``{"do": NAME, "with": {...}}``.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from fxamp.errors import FxampError

Answer = dict[str, Any]

#: Settings of the user's that choose what fxamp does; a measured process has its own.
_SETTINGS = ("FXAMP_POLICY", "FXAMP_DUMP")


class ContenderFailed(Exception):
    """A contender's process failed; the message says why."""


class Process:
    """A new interpreter that runs ``module`` as a worker; use it as a context manager, or close it.

    ``first`` is its first request; ``cache`` is the folder of Inductor's and Triton's caches: an empty one for a cold
    start, None for the user's own. Raises ContenderFailed if the process cannot answer a request.
    """

    def __init__(self, module: str, first: Mapping[str, Any], cache: Path | None) -> None:
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

    def ask(self, what: str, **arguments: Any) -> Answer:
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

    def _exchange(self, request: Mapping[str, Any]) -> Answer:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ContenderFailed(f"its process ended: {self._last_error()}")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise ContenderFailed(answer["error"])
        return answer

    def _last_error(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"status {status}" + (f", {lines[-1]}" if lines else "")


def _environment(cache: Path | None) -> dict[str, str]:
    """Return this process's environment with other caches, a path to this copy of fxamp, and no settings of fxamp."""
    import fxamp

    home = str(Path(fxamp.__file__).parent.parent)
    paths = [home, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    inherited = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    own = {} if cache is None else {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    return {**inherited, **own, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def serve(start: Callable[[Answer], Any], answers: Mapping[str, Callable[..., Answer]]) -> int:
    """Serve requests until stdin ends: the child's side. After an error, answer ``{"error": text}``, and raise it.

    ``start`` makes of the first request what is measured; ``answers`` are called with that and a request's arguments.
    """
    to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        measured = start(json.loads(sys.stdin.readline()))
        _answer(to, {})
        for line in sys.stdin:
            request = json.loads(line)
            _answer(to, answers[request["do"]](measured, **request["with"]))
    except Exception as error:
        _answer(to, {"error": str(error) if isinstance(error, FxampError) else error_line(error)})
        raise
    return 0


def _answer(to: TextIO, value: Answer) -> None:
    to.write(json.dumps(value) + "\n")
    to.flush()


def error_line(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {first}"
