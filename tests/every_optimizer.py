"""Every optimizer of torch.optim that takes dense gradients, in every form that skips in its own way."""

from typing import Any

from fxamp.tools.bench.optimizers.optimizers import ARGUMENTS, SPARSE_ONLY, Make, arguments_of_step, make

__all__ = ["ARGUMENTS", "FUSED", "OPTIMIZERS", "SPARSE_ONLY", "Make", "arguments_of_step", "make"]

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
