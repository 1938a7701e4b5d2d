"""Hugging Face Accelerate: compile before wrapping, and an optimizer wrapper that leaves the step to the scaler."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer

from fxamp.errors import OptionError
from fxamp.frameworks.setup import ScalerLike, Setup, device_of, setup, warn_untested
from fxamp.policy import Policy
from fxamp.reports.idle import stepped
from fxamp.scaler import GradScaler

warn_untested("accelerate")

#: Distributed types whose engines step, gather or scale by themselves.
_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)

#: Optimizers without a scaler that already have the hook for their first step.
_seen: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()

#: The scaler that :func:`prepare` gave to each accelerator.
_ours: "weakref.WeakKeyDictionary[Accelerator, GradScaler]" = weakref.WeakKeyDictionary()


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    policy: str | Policy = "auto",
    scaler: ScalerLike = None,
    options: Mapping[str, Any] | None = None,
    **compile_arguments: Any,
) -> Any:
    """Compile every model, call ``accelerator.prepare(*objects)``, and let the scaler step every optimizer.

    The loop does not change: ``accelerator.backward``, ``accumulate``, ``clip_grad_norm_``, ``save_state`` and
    ``load_state`` find the scaler at ``accelerator.scaler``. Gradients are unscaled after each backward.
    After ``accelerator.free_memory()``, as in Accelerate's ``find_executable_batch_size``, it can be called again, and
    makes a new scaler.

    Args:
        accelerator: with ``mixed_precision="no"``, or "bf16" for code outside the compiled graphs.
        objects: the arguments of ``accelerator.prepare``.
        policy: "auto", a built-in name, a path, or a Policy.
        scaler: a GradScaler; a dict of its arguments (``{"skip": "device"}``); None: the policy decides.
        options: further options of the backend. ``compile_arguments``: arguments of torch.compile, such as ``dynamic``.

    Returns:
        The result of ``accelerator.prepare``. With ``skip="device"``, a skip becomes known only after the step, so
        schedulers leave out a later step instead; nothing waits for the device.

    Raises:
        OptionError: the accelerator scales losses itself (``mixed_precision="fp16"``), uses another engine, or already
            has a scaler; or an argument is unknown or has an invalid value.
    """
    settings = setup("prepare", policy, scaler, options, compile_arguments)
    _require_free(accelerator)
    accelerator.scaler = settings.scaler
    if settings.scaler is not None:
        _ours[accelerator] = settings.scaler
    for item in objects:
        if isinstance(item, torch.nn.Module):
            settings.compile_in_place(item)
            make_scale(settings, item)
    prepared = accelerator.prepare(*objects)
    for item in accelerator._optimizers:
        take_over(item, settings.scaler)
    return prepared


def _require_free(accelerator: Accelerator) -> None:
    if accelerator.mixed_precision == "fp16":
        raise OptionError(
            'Accelerator(mixed_precision="fp16") scales losses itself; leave it out: float16 and its scaler come with '
            'policy="cuda-float16"'
        )
    if accelerator.distributed_type in _REFUSED:
        raise OptionError(f"distributed type {accelerator.distributed_type}: its engine steps and scales itself")
    if accelerator.scaler is not None and not _is_done(accelerator):
        raise OptionError(
            f"the accelerator has a scaler already, {type(accelerator.scaler).__name__}: call prepare once, with every "
            "model and optimizer, or again after accelerator.free_memory()"
        )


def _is_done(accelerator: Accelerator) -> bool:
    """Whether the scaler is :func:`prepare`'s, and the accelerator has released the models and optimizers with it."""
    own = _ours.get(accelerator) is accelerator.scaler
    return own and not (accelerator._models or accelerator._optimizers)


def make_scale(settings: Setup, model: torch.nn.Module) -> None:
    """Create the scale before the first step, even if no graph has run by then."""
    if settings.scaler is not None:
        settings.scaler.graph_scale(device_of(model))


def take_over(optimizer: AcceleratedOptimizer, scaler: GradScaler | None) -> None:
    """Step ``optimizer`` through ``scaler``; without a scaler, only check its first step.

    Raises OptionError if the wrapper is of a class other than AcceleratedOptimizer.
    """
    if type(optimizer) is not AcceleratedOptimizer:
        raise OptionError(f"{type(optimizer).__name__} has a step of its own; accepted: AcceleratedOptimizer")
    if scaler is not None:
        optimizer.scaler = _Steps(scaler, optimizer)
        optimizer.__setstate__({})
    elif optimizer.optimizer not in _seen:
        _seen.add(optimizer.optimizer)
        optimizer.optimizer.register_step_post_hook(lambda inner, args, kwargs: stepped(inner))


class _Steps:
    """The scaler as Accelerate's wrapper calls it.

    The wrapper replaces the optimizer's ``step`` by a function that cannot be compiled; this restores the original.
    With ``skip="device"`` a skip becomes known later. The wrapper learns of it at the first step after that, so
    schedules advance as often as steps are taken.
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
