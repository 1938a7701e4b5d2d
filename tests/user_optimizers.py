"""Optimizers of a user's own, each with a habit of its own."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxamp.tools.bench.optimizers.users_own import Counting

__all__ = ["Counting", "Differencing", "OnTheHost", "Remembering"]


class Differencing(Optimizer):
    """Its first step is unlike the others: there is no gradient before the first."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient: Tensor | None = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                change = gradient - state["before"] if "before" in state else gradient
                state["before"] = gradient.clone()
                parameter.sub_(group["lr"] * (gradient + 0.5 * change))


class OnTheHost(Counting):
    """Takes a square root of its count in Python: no graph can hold that."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.sub_(parameter.grad, alpha=group["lr"] / math.sqrt(state["step"]))


class Remembering(Counting):
    """Keeps a number outside of its state."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / self.calls)
