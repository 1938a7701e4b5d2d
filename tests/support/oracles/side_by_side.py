"""Run the same program against torch's scaler, which is the oracle, and fxamp's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxamp.scaler import GradScaler

Scaler = torch.amp.GradScaler
SCALERS: tuple[type[Scaler], type[Scaler]] = (Scaler, GradScaler)


@dataclass(frozen=True)
class Raised:
    """An exception as an outcome, comparable by its class."""

    kind: type[BaseException]
    message: str


def outcome(call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns, or what it raises as a value."""
    try:
        return call()
    except (AssertionError, RuntimeError, ValueError) as error:
        return Raised(type(error), str(error))


def assert_same(ours: Any, theirs: Any) -> None:
    """Assert exact equality through dicts and sequences; NaN equals NaN."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        same = ours.eq(theirs) | (ours.isnan() & theirs.isnan())
        assert same.all(), f"fxamp {ours}, torch {theirs}"
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert type(ours) is type(theirs) and len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert_same(our, their)
    elif isinstance(theirs, Raised):
        assert isinstance(ours, Raised), f"torch raised {theirs}, fxamp returned {ours}"
        assert ours.kind is theirs.kind
    elif isinstance(theirs, float):
        assert ours == theirs or (ours != ours and theirs != theirs)
    else:
        assert ours == theirs


def snapshot(parameters: list[torch.Tensor], optimizers: list[torch.optim.Optimizer]) -> Any:
    """Copy the parameters and the optimizers' states."""
    states = [
        {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        for optimizer in optimizers
        for state in optimizer.state_dict()["state"].values()
    ]
    return [parameter.detach().clone() for parameter in parameters], states
