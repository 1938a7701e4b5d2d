"""The precision in which an optimizer's compiled step stores its state: applies a policy's ``[optimizer]`` table."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxamp.errors import OptionError, nearest
from fxamp.kernels.blockwise_8bit import mixed
from fxamp.optim.packed_tensor import PackedTensor, is_packed, unpacked
from fxamp.optim.precision.state_signs import StateSigns
from fxamp.optim.reading.layout import Layout
from fxamp.passes.step.pack_state import COMPENSATION, COUNT, PackState
from fxamp.policy import OptimizerPrecision
from fxamp.policy.model.optimizer_table import EIGHT_BIT, OTHERS
from fxamp.torch_devices import moved
from fxamp.torch_dtypes import NARROW

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Precision:
    """The precision requested for one optimizer, and the ``seed`` of stochastic rounding."""

    table: OptimizerPrecision
    seed: int = 0


def unpack_state(optimizer: torch.optim.Optimizer) -> None:
    """Replace packed state by ordinary tensors, which the optimizer's own code can read and write."""
    for entry in optimizer.state.values():
        if isinstance(entry, dict):
            entry.update({name: unpacked(value) for name, value in entry.items() if is_packed(value)})


def complete_state(optimizer: torch.optim.Optimizer, table: OptimizerPrecision) -> None:
    """Add what compiled steps add to the state that the optimizer's own step has made.

    So the state has all entries after one step: torch.distributed.checkpoint loads no others into a new optimizer.
    """
    for owner, entry in optimizer.state.items():
        if isinstance(owner, Tensor) and entry:
            entry.update(initial_entries(table, owner, entry))


def require_names(layout: Layout, table: OptimizerPrecision) -> None:
    """Raise OptionError if the table names a state that does not exist or cannot be packed."""
    state: dict[str, Any] = {}
    for owner, entry in layout.state.items():
        if isinstance(owner, Tensor) and owner.dim():
            state |= {str(name): value for name, value in entry.items()}
    for name, form in table.state.items():
        if name == OTHERS or form == "float32":
            continue
        if name not in state:
            accepted = ", ".join(map(repr, state)) or "none: this optimizer keeps no state"
            raise OptionError(f"optimizer.state.{name}: no such state{nearest(name, state)}; accepted: {accepted}")
        value = state[name]
        if not isinstance(value, Tensor) or not value.dim():
            raise OptionError(
                f"optimizer.state.{name} = {form!r}: it is a counter or another single number, which is kept as it is"
            )


def _is_packable(value: Any, stored: str) -> bool:
    """Whether a value of the state is to be packed and is not packed yet."""
    if stored == "float32" or not isinstance(value, Tensor) or isinstance(value, PackedTensor) or not value.dim():
        return False
    return value.dtype is torch.float32 or (value.dtype in NARROW and NARROW[value.dtype] != stored)


#: For each word of the table the form of a state that may be negative, and of one that may not. The step divides by the
#: root of a second moment, which must not become 0 before the first one does.
_SIGNED = {"bfloat16": "bfloat16", "float8_e4m3fn": "e4m3fn", EIGHT_BIT: "s3m4"}
_UNSIGNED = {"bfloat16": "bfloat16", "float8_e4m3fn": "u5m3", EIGHT_BIT: "u5m3"}


def packed_state(
    layout: Layout, members: Sequence[int], table: OptimizerPrecision, signs: StateSigns
) -> dict[Any, dict[str, Tensor]]:
    """Return the packed form of the state to pack, for a kind's parameters; changes nothing.

    States that the step never makes negative get unsigned codes unless they are negative now; those of which it takes
    the root of a difference are not packed.
    """
    entries = [layout.state.get(layout.parameters[at], {}) for at in members]
    packed: dict[Any, dict[str, Tensor]] = {layout.parameters[at]: {} for at in members}
    for name in {name for entry in entries for name in entry}:
        stored = table.stored_as(str(name))
        exact = name in (COMPENSATION, *signs.under_roots)
        if exact or not all(_is_packable(entry.get(name), stored) for entry in entries):
            continue
        # A state has one form for all parameters of a kind, because one program reads it.
        signed = name not in signs.unsigned or any((entry[name] < 0).any() for entry in entries)
        form = _SIGNED[stored] if signed else _UNSIGNED[stored]
        for at, entry in zip(members, entries, strict=True):
            packed[layout.parameters[at]][name] = PackedTensor.of(entry[name], form)
    for at, entry in zip(members, entries, strict=True):
        parameter = layout.parameters[at]
        packed[parameter] |= initial_entries(table, parameter, entry)
        if _rounds_stochastically(table, parameter, entry) and not _is_count(entry, parameter):
            count = packed[parameter].get(COUNT, entry.get(COUNT))
            known = count if isinstance(count, Tensor) else torch.tensor(count, device="cpu")
            packed[parameter][COUNT] = moved(known.to(torch.int32), parameter.device, copy=True)
    return {owner: entry for owner, entry in packed.items() if entry}


def initial_entries(table: OptimizerPrecision, parameter: Tensor, entry: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the initial values of what the table adds to a parameter's state and ``entry`` lacks."""
    initial: dict[str, Any] = {}
    if table.weights == "kahan" and parameter.dtype in NARROW and COMPENSATION not in entry:
        initial[COMPENSATION] = torch.zeros_like(parameter, requires_grad=False)
    if _rounds_stochastically(table, parameter, entry) and COUNT not in entry:
        initial[COUNT] = 0
    return initial


def _rounds_stochastically(table: OptimizerPrecision, parameter: Tensor, entry: Mapping[Any, Any]) -> bool:
    """Whether a compiled step, which finds the state packed, rounds stochastically what it writes."""
    if table.rounding != "stochastic":
        return False
    state = {str(name): value for name, value in entry.items() if isinstance(value, Tensor) and name != COMPENSATION}
    written = [*state.values(), *([] if table.weights == "kahan" else [parameter])]
    return any(_form(value) not in ("", "float16") for value in written) or any(
        _is_packable(value, table.stored_as(name)) for name, value in state.items()
    )


def _is_count(entry: Mapping[Any, Any], parameter: Tensor) -> bool:
    count = entry.get(COUNT)
    return isinstance(count, Tensor) and count.dtype is torch.int32 and count.device == parameter.device


def pass_for(layout: Layout, at: int, table: OptimizerPrecision) -> PackState:
    """Return the pass that makes a kind's step read and write packed state; ``at``: one of its parameters."""
    parameter, gradient = layout.parameters[at], layout.gradients[at]
    assert gradient is not None
    entry = layout.state.get(parameter, {})
    stored = {name: _form(value) for name, value in (("parameter", parameter), ("gradient", gradient))}
    stored |= {str(n): _form(value) for n, value in entry.items() if isinstance(value, Tensor) and n != COMPENSATION}
    return PackState(
        {role: form for role, form in stored.items() if form},
        table.rounding == "stochastic",
        table.weights == "kahan" and COMPENSATION in entry,
    )


def _form(value: Tensor) -> str:
    if isinstance(value, PackedTensor):
        return value.form
    return NARROW.get(value.dtype, "") if value.dim() else ""


def streams(seed: int, members: Sequence[int]) -> Tensor:
    """Return the number of each parameter's stream of random bits: an int32, from seed and position."""
    place = torch.tensor(members, dtype=torch.int32, device="cpu")
    start = torch.tensor(seed * 0x9E3779B1 + 1 & 0xFFFFFFFF, device="cpu").to(torch.int32)  # modulo 2**32
    return mixed(mixed(place + 1) ^ mixed(start))


def parts_of(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors, with packed ones replaced by their parts."""
    for tensor in tensors:
        yield from tensor.parts if isinstance(tensor, PackedTensor) else (tensor,)
