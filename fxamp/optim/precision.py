"""In which precision one optimizer's compiled step keeps its state: a policy's ``[optimizer]`` table at work."""

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxamp.errors import OptionError, nearest
from fxamp.kernels.codes import MULTIPLIERS
from fxamp.optim.layout import Layout
from fxamp.optim.packed import Packed, is_packed, plain
from fxamp.optim.signs import is_negative_somewhere
from fxamp.passes.step.pack_state import COMPENSATION, PackState
from fxamp.policy import OptimizerPrecision
from fxamp.policy.model.optimizer_precision import OTHERS
from fxamp.torch_dtypes import NARROW

log = logging.getLogger(__name__)


@dataclass
class Precision:
    """What is asked of one optimizer. ``steps``: how many were made, for the keys of random bits; ``seed``: theirs."""

    asked: OptimizerPrecision
    seed: int = 0
    steps: int = 0

    @property
    def changes(self) -> bool:
        """Whether anything is other than the optimizer itself would have it."""
        return self.asked != OptimizerPrecision()


_precisions: "weakref.WeakKeyDictionary[torch.optim.Optimizer, Precision]" = weakref.WeakKeyDictionary()


def set_precision(optimizer: torch.optim.Optimizer, asked: OptimizerPrecision | None, seed: int) -> None:
    """Ask for a precision, from the next compiled step on; None for the optimizer's own. State is unpacked before."""
    known = _precisions.pop(optimizer, None)
    if known is not None and (asked is None or known.asked != asked):
        unpack_state(optimizer)
    if asked is not None:
        _precisions[optimizer] = Precision(asked, seed)


def precision_of(optimizer: torch.optim.Optimizer) -> Precision | None:
    """What is asked of the optimizer; None if nothing is."""
    found = _precisions.get(optimizer)
    return found if found is not None and found.changes else None


def unpack_state(optimizer: torch.optim.Optimizer) -> None:
    """Make ordinary tensors of packed state: what only the optimizer's own code may read and write."""
    for entry in optimizer.state.values():
        if isinstance(entry, dict):
            entry.update({name: plain(value) for name, value in entry.items() if is_packed(value)})


def require_names(layout: Layout, asked: OptimizerPrecision) -> None:
    """Raise OptionError if the table names a state that there is not, or one that cannot be packed."""
    found: dict[str, Any] = {}
    for owner, entry in layout.state.items():
        if isinstance(owner, Tensor) and owner.dim():
            found |= {str(name): value for name, value in entry.items()}
    for name, form in asked.state.items():
        if name == OTHERS or form == "float32":
            continue
        if name not in found:
            accepted = ", ".join(map(repr, found)) or "none: this optimizer keeps no state"
            raise OptionError(f"optimizer.state.{name}: no such state{nearest(name, found)}; accepted: {accepted}")
        value = found[name]
        if not isinstance(value, Tensor) or not value.dim():
            raise OptionError(
                f"optimizer.state.{name} = {form!r}: it is a counter or another single number, which is kept as it is"
            )


def packable(value: Any, kept: str) -> bool:
    """Whether a value of the state can be packed, and is not kept so already."""
    if not isinstance(value, Tensor) or isinstance(value, Packed) or not value.dim():
        return False
    return value.dtype is torch.float32 or (value.dtype in NARROW and NARROW[value.dtype] != kept)


def packed_state(
    layout: Layout, members: Sequence[int], asked: OptimizerPrecision, unsigned: Iterable[str]
) -> dict[Any, dict[str, Tensor]]:
    """Return the state of a kind's parameters that is to be kept otherwise, as is asked; changes nothing.

    ``unsigned``: states that never become negative. One that is negative now is not trusted to be.
    """
    entries = [layout.state.get(layout.parameters[at], {}) for at in members]
    found: dict[Any, dict[str, Tensor]] = {layout.parameters[at]: {} for at in members}
    for name in {name for entry in entries for name in entry}:
        kept = asked.kept_as(str(name))
        if kept == "float32" or name == COMPENSATION or not all(packable(entry.get(name), kept) for entry in entries):
            continue
        signed = name not in unsigned or any(is_negative_somewhere(entry[name]) for entry in entries)
        form = {"bfloat16": "bfloat16", "float8_e4m3fn": "e4m3fn", "int8": "s3m4" if signed else "u5m3"}[kept]
        for at, entry in zip(members, entries, strict=True):
            found[layout.parameters[at]][name] = Packed.of(entry[name], form)
    for at, entry in zip(members, entries, strict=True):
        parameter = layout.parameters[at]
        if asked.weights == "kahan" and parameter.dtype in NARROW and COMPENSATION not in entry and entry:
            found[parameter][COMPENSATION] = torch.zeros_like(parameter, requires_grad=False)
    return {owner: entry for owner, entry in found.items() if entry}


def pass_for(layout: Layout, at: int, asked: OptimizerPrecision) -> PackState:
    """The pass that makes a kind's step read and write what is stored; ``at``: one of its parameters."""
    parameter, gradient = layout.parameters[at], layout.gradients[at]
    assert gradient is not None
    entry = layout.state.get(parameter, {})
    stored = {name: _form(value) for name, value in (("parameter", parameter), ("gradient", gradient))}
    stored |= {str(n): _form(value) for n, value in entry.items() if isinstance(value, Tensor) and n != COMPENSATION}
    return PackState(
        {role: form for role, form in stored.items() if form},
        asked.rounding == "stochastic",
        asked.weights == "kahan" and COMPENSATION in entry,
    )


def _form(value: Tensor) -> str:
    if isinstance(value, Packed):
        return value.form
    return NARROW.get(value.dtype, "") if value.dim() else ""


def keys(precision: Precision, members: Sequence[int]) -> Tensor:
    """The keys of one step's random bits, int32, one for each parameter: of the seed, the step and its place."""
    place = np.asarray(members, dtype=np.uint32)
    start = np.uint32((precision.seed * 0x9E3779B1 + precision.steps * 0x85EBCA77 + 1) & 0xFFFFFFFF)
    mixed = _mixed(_mixed(place + np.uint32(1)) ^ _mixed(np.full_like(place, start)))
    return torch.from_numpy(mixed.view(np.int32))


def _mixed(x: Any) -> Any:
    """The same hash as :func:`fxamp.kernels.codes.mixed`, of uint32."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(MULTIPLIERS[0])
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(MULTIPLIERS[1] & 0xFFFFFFFF)
    return x ^ (x >> np.uint32(16))


def parts_of(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors, with the parts of packed ones in their place."""
    for tensor in tensors:
        yield from tensor.parts if isinstance(tensor, Packed) else (tensor,)
