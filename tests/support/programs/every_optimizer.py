"""Every optimizer of torch.optim that takes dense gradients, in every form that skips in its own way."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, optim

Make = Callable[[Iterable[Tensor]], optim.Optimizer]

#: Those that take no dense gradients.
SPARSE_ONLY = {"SparseAdam"}

#: Name -> arguments that it needs, or that make it run more of its own code.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ASGD": {},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "LBFGS": {"max_iter": 2},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
}


def make(name: str, arguments: Mapping[str, Any]) -> Make:
    """torch.optim's optimizer of that name, with these arguments."""
    return partial(getattr(optim, name), **arguments)


def arguments_of_step(optimizer: optim.Optimizer) -> tuple[Any, ...]:
    """Return the arguments of ``step``: only LBFGS needs a closure, which torch's scaler passes on."""
    if not isinstance(optimizer, optim.LBFGS):
        return ()
    return (lambda: torch.zeros(()),)


FUSED: dict[str, dict[str, Any]] = {
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
}

OPTIMIZERS: dict[str, Make] = {
    **{name: make(name, arguments) for name, arguments in ARGUMENTS.items()},
    **{f"fused {name}": make(name, {"fused": True, **arguments}) for name, arguments in FUSED.items()},
    "fused SGD, no momentum": make("SGD", {"lr": 0.1, "fused": True}),
    "foreach AdamW": make("AdamW", {"foreach": True}),
}
