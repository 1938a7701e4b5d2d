"""A process that measures: functions are called there, with an object that lives there as their first argument.

Both sides pickle what they send: calls go to the process's stdin, answers to its original stdout. What the process
prints goes to stderr.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Concatenate, ParamSpec, Self, TypeVar

from fxamp.errors import FxampError
from fxamp.tools.common.silence import one_line

P = ParamSpec("P")
T = TypeVar("T")

#: Settings of the user's that choose what fxamp does; a measured process has its own.
_SETTINGS = ("FXAMP_POLICY", "FXAMP_DUMP", "FXAMP_NONFINITE")


class ContenderFailed(Exception):
    """A contender's process failed; the message says why."""


class Process:
    """A new process that makes an object by ``start(*arguments)``; use it as a context manager, or close it.

    ``cache`` is the folder of Inductor's and Triton's caches: an empty one for a cold start, None for the user's own.
    ``settings``: further variables of its environment. Raises ContenderFailed if the process cannot make the object, or
    answer a call.
    """

    def __init__(
        self,
        start: Callable[..., Any],
        *arguments: Any,
        cache: Path | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._unread = False  # whether an answer is still to come, after Ctrl-C
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fxamp.tools.bench.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**_environment(cache), **settings},
            start_new_session=True,  # Ctrl-C ends the rounds, not the worker in the middle of an answer
        )
        try:
            self._exchange(start, arguments, {})
        except BaseException:
            self.close()
            raise

    def ask(self, function: Callable[Concatenate[Any, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function of a module there, with the object and these arguments; return what it returns."""
        result: T = self._exchange(function, arguments, named)
        return result

    def close(self) -> None:
        """End the process."""
        self.kill()
        self._process.communicate()
        self._errors.close()

    def kill(self) -> None:
        """End the process while another thread may wait for its answer: there ContenderFailed is raised."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, *call: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            if self._unread:
                pickle.load(self._process.stdout)
            self._unread = True
            pickle.dump(call, self._process.stdin)
            self._process.stdin.flush()
            works, answer = pickle.load(self._process.stdout)
            self._unread = False
        except (EOFError, BrokenPipeError) as error:
            raise ContenderFailed(f"its process ended: {self._last_error()}") from error
        if not works:
            raise ContenderFailed(answer)
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


def serve() -> int:
    """Answer calls until stdin ends: the child's side. The first one makes the object, and is answered by None.

    After an error, answer its text, and raise it.
    """
    to = os.fdopen(os.dup(1), "wb")
    calls: Any = sys.stdin.buffer
    os.dup2(2, 1)
    try:
        start, arguments, _ = pickle.load(calls)
        measured = start(*arguments)
        _answer(to, True, None)
        while calls.peek(1):
            function, arguments, named = pickle.load(calls)
            _answer(to, True, function(measured, *arguments, **named))
    except Exception as error:
        _answer(to, False, str(error) if isinstance(error, FxampError) else one_line(error))
        raise
    return 0


def _answer(to: BinaryIO, works: bool, value: Any) -> None:
    pickle.dump((works, value), to)
    to.flush()


if __name__ == "__main__":
    raise SystemExit(serve())
