"""The containers and objects that an optimizer holds, and so its step can read and change."""

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxamp.optim.errors import NotCompilableError
from fxamp.optim.reading.fingerprint import PLAIN

ITEMS = list, tuple, set, frozenset, deque
_OPAQUE = (
    *(Tensor, *PLAIN, torch.SymFloat, torch.SymInt, torch.SymBool),
    *(type, ModuleType, FunctionType, BuiltinFunctionType),
    *(torch.optim.Optimizer, logging.Logger),
)
"""Classes whose objects are not looked into: they have no state of their own, or a step may change it."""
_INTERNAL = "torch._", "torch.fx.", "torch.distributed.", "fxamp."
"""Prefixes of modules whose objects are not looked into either: tracing a step changes what they cache."""


class Held(NamedTuple):
    """A container or object. ``name``: the optimizer's attribute that holds it; ``direct``: only through containers."""

    name: str
    value: Any
    direct: bool


def reachable(roots: Mapping[str, Any]) -> Iterator[Held]:
    """Yield every container and object that ``roots`` hold, themselves or in others, each once."""
    remaining, seen = [Held(name, value, True) for name, value in roots.items()], set()
    while remaining:
        name, value, direct = remaining.pop()
        items = held_by(value)
        if items is not None and id(value) not in seen:
            seen.add(id(value))
            yield Held(name, value, direct)
            direct &= isinstance(value, (dict, *ITEMS))
            remaining += [Held(name, item, direct) for item in items]


def held_by(value: Any) -> Sequence[Any] | None:
    """Return the items of a container, or the attributes of an object; None if a step reads ``value`` alone."""
    if isinstance(value, _OPAQUE) or type(value).__module__.startswith(_INTERNAL):
        return None
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, ITEMS):
        return list(value)
    if isinstance(value, MethodType):
        return [value.__self__]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        return list(attributes.values())
    return [] if isinstance(value, Iterator) else None


def require_no_identities(roots: Mapping[str, Any], owners: Collection[Tensor]) -> None:
    """Raise NotCompilableError if ``roots`` hold parameters or their ids: the stand-ins that are traced have others.

    Parameters as the attributes of an object, such as a module, are accepted.
    """
    ids = {id(owner) for owner in owners}
    for name, value, direct in reachable(roots):
        if not isinstance(value, (dict, *ITEMS)):
            continue
        keys = () if isinstance(value, (list, tuple, deque)) else value
        values = value.values() if isinstance(value, dict) else value
        tensors = [*keys, *(values if direct else ())]
        if any(isinstance(item, Tensor) and id(item) in ids for item in tensors):
            raise NotCompilableError(f"its {name!r} holds parameters; accepted: in 'params' of its groups")
        if any(type(item) is int and item in ids for item in (*keys, *values)):
            raise NotCompilableError(f"its {name!r} holds the ids of parameters; accepted: settings of their groups")
