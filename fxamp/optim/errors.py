"""Exceptions that say why a step does not run compiled. Users read them in the log and never have to catch them."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxamp.torch_private.parts.fx import DataDependentOutputException


class NotCompilableError(Exception):
    """A step cannot be compiled; the message says why. Never reaches the user."""


class MakesStateError(Exception):
    """A step creates state, which only the optimizer itself can do; the message says what. Never reaches the user."""


class CountsError(NotCompilableError):
    """A step adds one to settings of its groups that are not counted yet, ``names``. Never reaches the user."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(f"its step counts in its param_groups: {', '.join(sorted(names))}")
        self.names = names


class OtherWriteError(Exception):
    """An op of a traced step would write to a tensor that the step was not given. Never reaches the user."""


@contextmanager
def explaining_failures() -> Iterator[None]:
    """Turn any other exception of a trace into a NotCompilableError that names the line of the step's own code."""
    try:
        yield
    except (NotCompilableError, MakesStateError):
        raise
    except Exception as error:
        raise NotCompilableError(f"{_reason(error)}{_place(error.__traceback__)}") from error


def _reason(error: Exception) -> str:
    line = "".join(str(error).strip().splitlines()[:1])
    if isinstance(error, (GuardOnDataDependentSymNode, DataDependentOutputException)):
        return "it reads the value of a tensor on the host, as float(), .item() and if do; accepted: ops on the tensor"
    if isinstance(error, OtherWriteError):
        return "it writes to a tensor that is neither a parameter, a gradient, its state nor an attribute of it"
    if "FakeTensor" in line:
        return "it reads a tensor that is neither a parameter, a gradient, its state nor an attribute of it"
    return f"it cannot be traced: {type(error).__name__}: {line}"


def _place(trace: TracebackType | None) -> str:
    """Return where the step's own code raised: its last line outside of torch and fxamp."""
    frames = [f for f in traceback.extract_tb(trace) if f.line and not _LIBRARIES & {*Path(f.filename).parents}]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""


_LIBRARIES = {Path(torch.__file__).parent, Path(__file__).parents[1]}
