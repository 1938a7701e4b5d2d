"""The records of all graphs that this process compiled, each with the callables whose call led to it."""

import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from fxamp.pipeline import GraphRecord


@dataclass(frozen=True)
class _Entry:
    record: GraphRecord
    owners: tuple[weakref.ref[Any], ...]
    parameters: tuple[weakref.ref[Any], ...]

    @property
    def forgotten(self) -> bool:
        """Whether nothing is left that could ask for this record."""
        return bool(self.owners) and all(owner() is None for owner in self.owners)


#: In order of compilation; None where nobody is left to ask.
_entries: list[_Entry | None] = []


def remember(record: GraphRecord, inputs: Sequence[Any]) -> None:
    """Keep ``record`` under every module and compiled function that is being called now; they are held weakly.

    ``inputs`` are the graph's, real or fake: the parameters among them are remembered as read by a graph.
    """
    _entries[:] = [None if entry is None or entry.forgotten else entry for entry in _entries]
    owners = {id(owner): weakref.ref(owner) for owner in _called(sys._getframe(1))}
    parameters = [weakref.ref(value) for value in inputs if isinstance(value, torch.nn.Parameter)]
    _entries.append(_Entry(record, tuple(owners.values()), tuple(parameters)))


def count() -> int:
    """How many graphs were compiled so far."""
    return len(_entries)


def recent(since: int) -> list[GraphRecord]:
    """The records from number ``since`` on, in order of compilation, as far as their models still exist."""
    return [entry.record for entry in _entries[since:] if entry is not None]


def records_of(compiled: Any) -> list[GraphRecord]:
    """The records of the graphs compiled by calls of ``compiled``, a module or function, in order of compilation."""
    return [entry.record for entry in _entries_of(compiled)]


def outside(compiled: Any) -> list[str]:
    """The names of the parameters of ``compiled`` that no graph compiled by its calls reads."""
    if not isinstance(compiled, torch.nn.Module):
        return []
    read = {id(parameter()) for entry in _entries_of(compiled) for parameter in entry.parameters}
    module = getattr(compiled, "_orig_mod", compiled)
    return [name for name, parameter in module.named_parameters() if id(parameter) not in read]


def _entries_of(compiled: Any) -> list[_Entry]:
    names = ("_orig_mod", "_torchdynamo_orig_callable")
    wanted = {id(compiled)} | {id(getattr(compiled, name)) for name in names if hasattr(compiled, name)}
    return [entry for entry in _entries if entry is not None and wanted & {id(ref()) for ref in entry.owners}]


def _called(frame: FrameType | None) -> Iterator[Any]:
    """The modules and compiled functions whose calls are on the Python stack."""
    while frame is not None:
        if frame.f_code.co_filename == torch.nn.modules.module.__file__:
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module):
                yield module
        elif frame.f_code.co_filename == torch._dynamo.eval_frame.__file__:
            function = frame.f_locals.get("fn")
            if hasattr(function, "__code__"):
                yield function
        frame = frame.f_back
