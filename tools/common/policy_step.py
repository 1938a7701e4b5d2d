"""An optimizer as a policy asks: compiled if the policy sets the precision of its state or of the weights."""

import torch

from fxamp.optim.compile_optimizer import compile_optimizer
from fxamp.policy import OptimizerPrecision, Policy


def optimizer_precision(policy: str) -> OptimizerPrecision | None:
    """Return what the policy's ``[optimizer]`` table says; None for "auto", and where it changes nothing.

    ``policy``: a name or a file.
    """
    precision = None if policy == "auto" else Policy.load(policy).optimizer
    return None if precision == OptimizerPrecision() else precision


def stepped_by_policy(optimizer: torch.optim.Optimizer, policy: str, lowering: str) -> torch.optim.Optimizer:
    """Compile the optimizer's step if the policy has an ``[optimizer]`` table; return the same object."""
    if optimizer_precision(policy) is None:
        return optimizer
    return compile_optimizer(optimizer, policy, lowering="aot_eager" if lowering == "eager" else lowering)
