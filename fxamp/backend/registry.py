"""The records of all graphs that this process compiled, findable by the parameters that the graphs use."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxamp.pipeline import GraphRecord


@dataclass(frozen=True)
class _Entry:
    record: GraphRecord
    alive: tuple[weakref.ref[torch.Tensor], ...]


_entries: list[_Entry] = []


def remember(record: GraphRecord, inputs: Sequence[Any]) -> None:
    """Keep ``record`` under the parameters among ``inputs``; the tensors themselves are held weakly."""
    parameters = [value for value in inputs if isinstance(value, torch.nn.Parameter)]
    _entries.append(_Entry(record, tuple(map(weakref.ref, parameters))))


def recent(since: int) -> list[GraphRecord]:
    """The records from number ``since`` on, in order of compilation."""
    return [entry.record for entry in _entries[since:]]


def count() -> int:
    """How many graphs were compiled so far."""
    return len(_entries)


def records_of(model: torch.nn.Module) -> list[GraphRecord]:
    """The records of the graphs that read a parameter of ``model``, in order of compilation."""
    own = {id(parameter) for parameter in model.parameters()}
    return [
        entry.record
        for entry in _entries
        if own & {id(tensor) for ref in entry.alive if (tensor := ref()) is not None}
    ]
