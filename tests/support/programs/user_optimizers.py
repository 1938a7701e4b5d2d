"""Optimizers of a user's own, each with a habit of its own."""

import math
from typing import Any

import torch
from torch.optim import Optimizer


class EachParameter(Optimizer):
    """Steps the parameters that have a gradient, one after the other, by :meth:`step_one`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient; takes no closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, group)

    def step_one(self, parameter: Any, group: dict[str, Any]) -> None:
        """Step one parameter of a group."""
        raise NotImplementedError


class Counting(EachParameter):
    """A Python loop, state of its own: a Python int that counts, a tensor that is bound anew, ``p.data``.

    Adam's mean without its variance: ``p -= lr * mean / (1 - beta ** step)``.
    """

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta})

    def step_one(self, parameter: Any, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"], state["mean"] = 0, torch.zeros_like(parameter)
        state["step"] += 1
        state["mean"] = group["beta"] * state["mean"] + (1 - group["beta"]) * parameter.grad
        corrected = state["mean"] / (1 - group["beta"] ** state["step"])
        parameter.data.add_(corrected, alpha=-group["lr"])


class Differencing(EachParameter):
    """Its first step is unlike the others: there is no gradient before the first."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step_one(self, parameter: Any, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        change = gradient - state["before"] if "before" in state else gradient
        state["before"] = gradient.clone()
        parameter.sub_(group["lr"] * (gradient + 0.5 * change))


class OnTheHost(Counting):
    """Takes a square root of its count in Python: no graph can hold that."""

    def step_one(self, parameter: Any, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        parameter.sub_(parameter.grad, alpha=group["lr"] / math.sqrt(state["step"]))


class Remembering(Counting):
    """Keeps a number outside of its state."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        super().step()

    def step_one(self, parameter: Any, group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad, alpha=group["lr"] / self.calls)
