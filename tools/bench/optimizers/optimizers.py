"""The optimizers: those of the installed torch.optim, and one of a user's own."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, optim

from fxamp.tools.bench.optimizers.users_own import Counting

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


@dataclass(frozen=True)
class Choice:
    """An optimizer class and its arguments; calling it makes one for given parameters."""

    kind: type[optim.Optimizer]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, parameters: Iterable[Tensor]) -> optim.Optimizer:
        return self.kind(parameters, **self.arguments)

    @property
    def sparse(self) -> bool:
        """Whether it takes sparse gradients alone."""
        return self.kind.__name__ in SPARSE_ONLY

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        own = "" if self.kind.__module__.startswith("torch.") else ", a user's own"
        return self.kind.__name__ + (f"({given})" if given else "") + own


def make(name: str, arguments: Mapping[str, Any]) -> Choice:
    """torch.optim's optimizer of that name, with these arguments."""
    return Choice(getattr(optim, name), arguments)


def choices() -> dict[str, Choice]:
    """Every optimizer class that ``torch.optim`` shows, in alphabetical order, then a user's own, by name."""
    kinds = [each for each in vars(optim).values() if isinstance(each, type) and issubclass(each, optim.Optimizer)]
    names = sorted({kind.__name__ for kind in kinds if kind is not optim.Optimizer}, key=str.lower)
    return {name: make(name, ARGUMENTS.get(name, {})) for name in names} | {"Counting": Choice(Counting)}


def arguments_of_step(optimizer: optim.Optimizer) -> tuple[Any, ...]:
    """Return the arguments of ``step``: only LBFGS needs a closure, which torch's scaler passes on."""
    if not isinstance(optimizer, optim.LBFGS):
        return ()
    return (lambda: torch.zeros(()),)
