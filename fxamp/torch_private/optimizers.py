"""Optimizers: the hooks of their steps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import optimizer as _optimizers


def is_initialized(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch.optim.Optimizer.__init__ has run; many wrappers do not call it, so they have no hooks."""
    return "_optimizer_state_dict_post_hooks" in vars(optimizer)


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> Sequence[Callable[..., Any]]:
    """Return the hooks that run before a step, in order: those of all optimizers, then this one's. Breaks loudly."""
    try:
        hooks = _optimizers._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks
    except AttributeError:
        if is_initialized(optimizer):
            raise
        return []
    return [hook for table in hooks for hook in table.values()]


def step_post_hooks(optimizer: torch.optim.Optimizer) -> Sequence[Callable[..., Any]]:
    """Return the hooks that run after a step, in order: this optimizer's, then those of all. Breaks loudly."""
    try:
        hooks = optimizer._optimizer_step_post_hooks, _optimizers._global_optimizer_post_hooks
    except AttributeError:
        if is_initialized(optimizer):
            raise
        return []
    return [hook for table in hooks for hook in table.values()]


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped; if torch renames it, they warn of a wrong order."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
