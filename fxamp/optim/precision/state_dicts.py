"""Convert an optimizer's state to the form that it has without compiled steps, so that a saved one loads anywhere."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxamp.optim.packed_tensor import is_packed, packed_copy, unpacked
from fxamp.optim.reading.layout import optimized_parameters
from fxamp.passes.step.pack_state import COUNT


def plain_state(saved: Mapping[str, Any], numbers: Mapping[str, type[int] | type[float]]) -> dict[Any, Any]:
    """Return the state of ``saved``, a state_dict, as an eager step keeps it: no tensor packed, and numbers as numbers.

    If anything in it had another form, the result is a copy, which later steps do not change. Otherwise it holds the
    optimizer's own tensors, as torch's state_dict does. A step counter that moves to the CPU is not another form.
    Entries that are not dicts, such as a tensor at ``optimizer.state["k"]``, are in the same form in both.

    Args:
        saved: what torch makes of the state as the compiled step stores it.
        numbers: the names of the numbers that the compiled step stores as tensors, and their types.
    """
    others = {at: entry for at, entry in saved["state"].items() if not isinstance(entry, dict)}
    state = {at: entry for at, entry in saved["state"].items() if at not in others}
    plain = {at: {name: _plain(name, value, numbers) for name, value in entry.items()} for at, entry in state.items()}
    if any(value is not state[at][name] for at, entry in plain.items() for name, value in entry.items()):
        plain = {at: {n: _copied(v) if v is state[at][n] else v for n, v in e.items()} for at, e in plain.items()}
        others = {at: _copied(entry) for at, entry in others.items()}
    groups = {at: group for group in saved["param_groups"] for at in group["params"]}
    for at, entry in plain.items():
        step = entry.get("step")
        if isinstance(step, Tensor) and not _counts_on_device(groups.get(at, {})):
            entry["step"] = step.cpu()
    return {at: others.get(at, plain.get(at)) for at in saved["state"]}


def _plain(name: str, value: Any, numbers: Mapping[str, type[int] | type[float]]) -> Any:
    """Return a value in the form that it has without compiled steps; the value itself if it has that form.

    Counters are numbers again because optimizers convert loaded tensors to the parameter's dtype.
    """
    number = int if name == COUNT else numbers.get(name)
    return number(value) if number is not None and isinstance(value, Tensor) else unpacked(value)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    """Whether torch keeps ``step`` on the device of a parameter with these settings, and not on the CPU."""
    return bool(group.get("capturable") or group.get("fused"))


def packed_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` with the state as it is stored, packed if the policy says so.

    All of it is a copy, which later steps do not change. It holds ``PackedTensor``: only a program that has fxamp can
    load it, into an optimizer compiled with any policy, or none.
    """
    saved = optimizer.state_dict()
    parameters = optimized_parameters(optimizer)
    places = [at for packed in saved["param_groups"] for at in packed["params"]]
    stored = {at: optimizer.state.get(parameter, {}) for at, parameter in zip(places, parameters, strict=True)}
    state = {
        at: {**entry, **{n: packed_copy(v) for n, v in stored.get(at, {}).items() if n in entry and is_packed(v)}}
        for at, entry in saved["state"].items()
        if isinstance(entry, dict)
    }
    return {**saved, "state": {**saved["state"], **state}}
