"""Convert an optimizer's state to the form that it has without compiled steps, so that a saved one loads anywhere."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxamp.optim.precision.packed_tensor import is_packed, unpacked
from fxamp.passes.step.pack_state import COUNT


def plain_entry(
    entry: Mapping[str, Any], group: Mapping[str, Any], numbers: Mapping[str, type[int] | type[float]]
) -> dict[str, Any]:
    """Return one owner's entry, with its numbers as numbers, and its step counter where an eager step keeps it.

    Counters are numbers again because optimizers convert loaded tensors to the parameter's dtype.

    Args:
        entry: the owner's state as the compiled step stores it.
        group: the owner's settings. Unless they enable "capturable" or "fused", torch keeps ``step`` on the CPU.
        numbers: the names of the numbers that the compiled step stores as tensors, and their types.
    """
    on_device = group.get("capturable") or group.get("fused")
    shown = {name: unpacked(value) for name, value in entry.items()}
    for name, number in {COUNT: int, **numbers}.items():
        if isinstance(shown.get(name), Tensor):
            shown[name] = number(shown[name])
    return {
        name: value.cpu() if name == "step" and isinstance(value, Tensor) and not on_device else value
        for name, value in shown.items()
    }


def packed_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` with the state as it is stored, packed if the policy says so.

    It holds ``PackedTensor``: only a program that has fxamp can load it, into an optimizer compiled with any policy, or
    none.
    """
    saved = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    places = [at for packed in saved["param_groups"] for at in packed["params"]]
    stored = {at: optimizer.state.get(parameter, {}) for at, parameter in zip(places, parameters, strict=True)}
    state = {
        at: {n: stored[at][n] if at in stored and is_packed(stored[at].get(n)) else v for n, v in entry.items()}
        for at, entry in saved["state"].items()
    }
    return {**saved, "state": state}
