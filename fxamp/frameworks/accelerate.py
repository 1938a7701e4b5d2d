"""Hugging Face Accelerate: compile before wrapping, and an optimizer wrapper that leaves the step to the scaler."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer

from fxamp.errors import OptionError
from fxamp.frameworks.setup import ScalerLike, Setup, device_of, setup
from fxamp.optim.first_steps import stepped
from fxamp.policy import Policy
from fxamp.scaler import GradScaler

#: Where Accelerate's own engines step, gather or scale in their own ways.
_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)

#: Optimizers without a scaler whose first step is looked at.
_seen: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    policy: str | Policy = "auto",
    scaler: ScalerLike = None,
    options: Mapping[str, Any] | None = None,
    **compile_arguments: Any,
) -> Any:
    """Do ``accelerator.prepare(*objects)``, with every model compiled before it is wrapped, and scaled if in float16.

    The loop stays as it is: ``accelerator.backward``, ``accumulate``, ``clip_grad_norm_``, ``save_state`` and
    ``load_state`` find the scaler at ``accelerator.scaler``. Gradients are true from the backward on.

    Args:
        accelerator: with ``mixed_precision="no"``, or "bf16" for what is left outside of the graphs.
        objects: as ``accelerator.prepare`` takes them.
        policy: "auto", a built-in name, a path, or a Policy.
        scaler: a GradScaler; a dict of its arguments (``{"skip": "device"}``); None: as the policy says.
        options: further options of the backend; ``compile_arguments`` are torch.compile's, such as ``dynamic``.

    Returns:
        What ``accelerator.prepare`` returns. Where the device decides on skips, schedulers hear of one as soon as it is
        known, and make up for it: nobody waits.

    Raises:
        OptionError: the accelerator scales by itself (``mixed_precision="fp16"``), is driven by another engine, or was
            given a scaler before; or an argument has a value that is not accepted.
    """
    made = setup(policy, scaler, options, compile_arguments)
    _require_free(accelerator)
    if made.scaler is not None:
        accelerator.scaler = made.scaler
    for each in objects:
        if isinstance(each, torch.nn.Module):
            made.compile_in_place(each)
            make_scale(made, each)
    prepared = accelerator.prepare(*objects)
    for each in accelerator._optimizers:
        take_over(each, made.scaler)
    return prepared


def _require_free(accelerator: Accelerator) -> None:
    if accelerator.mixed_precision == "fp16":
        raise OptionError(
            'Accelerator(mixed_precision="fp16") scales losses itself; leave it out: float16 and its scaler come with '
            'policy="cuda-float16"'
        )
    if accelerator.distributed_type in _REFUSED:
        raise OptionError(f"distributed type {accelerator.distributed_type}: its engine steps and scales by itself")
    if accelerator.scaler is not None:
        raise OptionError(
            f"the accelerator has a scaler already, {type(accelerator.scaler).__name__}: call prepare once, with every "
            "model and optimizer"
        )


def make_scale(made: Setup, model: torch.nn.Module) -> None:
    """Let the scaler have its scale before the first step, which no graph may have run for."""
    if made.scaler is not None:
        made.scaler.graph_scale(device_of(model))


def take_over(optimizer: AcceleratedOptimizer, scaler: GradScaler | None) -> None:
    """Let ``optimizer`` step by ``scaler``; without one, only look at the first step.

    Raises OptionError for a wrapper that is not Accelerate's plain one.
    """
    if type(optimizer) is not AcceleratedOptimizer:
        raise OptionError(f"{type(optimizer).__name__} steps in a way of its own; accepted: AcceleratedOptimizer")
    if scaler is not None:
        optimizer.scaler = _Steps(scaler, optimizer)
        optimizer.__setstate__({})
    elif optimizer.optimizer not in _seen:
        _seen.add(optimizer.optimizer)
        optimizer.optimizer.register_step_post_hook(lambda inner, args, kwargs: stepped(inner))


class _Steps:
    """The scaler as the wrapper calls it, which puts another function in the place of the optimizer's step.

    That one could not run compiled. Where the device skips, nobody knows of it yet: the wrapper is told of a skip with
    the first step after it became known, so that schedules stay where the steps are that were taken.
    """

    def __init__(self, scaler: GradScaler, wrapper: AcceleratedOptimizer) -> None:
        self._scaler, self._wrapper = scaler, wrapper
        self._untold = 0

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        wrapper = self._wrapper
        optimizer.step = wrapper._optimizer_original_step_method  # type: ignore[method-assign]
        self._scaler.step(optimizer, *(() if closure is None else (closure,)))
        self._untold += self._scaler.poll_steps().count(False)
        wrapper._accelerate_step_called = not self._untold
        self._untold -= bool(self._untold)

    def update(self) -> None:
        self._scaler.update()
