"""The records of all graphs that this process compiled, each with the callables whose call led to it."""

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from fxamp.pipeline import GraphRecord


@dataclass(frozen=True)
class _Entry:
    record: GraphRecord
    owners: tuple[weakref.ref[Any], ...]


_entries: list[_Entry] = []


def remember(record: GraphRecord) -> None:
    """Keep ``record`` under every module and compiled function that is being called now; they are held weakly."""
    owners = {id(owner): weakref.ref(owner) for owner in _called(sys._getframe(1))}
    _entries.append(_Entry(record, tuple(owners.values())))


def count() -> int:
    """How many graphs were compiled so far."""
    return len(_entries)


def recent(since: int) -> list[GraphRecord]:
    """The records from number ``since`` on, in order of compilation."""
    return [entry.record for entry in _entries[since:]]


def records_of(compiled: Any) -> list[GraphRecord]:
    """The records of the graphs compiled by calls of ``compiled``, a module or function, in order of compilation."""
    names = ("_orig_mod", "_torchdynamo_orig_callable")
    wanted = {id(compiled)} | {id(getattr(compiled, name)) for name in names if hasattr(compiled, name)}
    return [entry.record for entry in _entries if wanted & {id(ref()) for ref in entry.owners}]


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
