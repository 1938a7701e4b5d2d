"""An optimizer that torch does not know, as a user would write it."""

from typing import Any

import torch
from torch.optim import Optimizer


class Counting(Optimizer):
    """A Python loop, state of its own: a Python int that counts, a tensor that is bound anew, ``p.data``.

    Adam's mean without its variance: ``p -= lr * mean / (1 - beta ** step)``.
    """

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient; takes no closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(parameter)
                state["step"] += 1
                state["mean"] = group["beta"] * state["mean"] + (1 - group["beta"]) * parameter.grad
                corrected = state["mean"] / (1 - group["beta"] ** state["step"])
                parameter.data.add_(corrected, alpha=-group["lr"])
