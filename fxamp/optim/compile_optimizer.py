"""``compile_optimizer``: the same optimizer, whose ``step()`` runs as one generated program for all parameters."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from fxamp.errors import OptionError, nearest
from fxamp.kernels import check_
from fxamp.lowerings import STEP_LOWERINGS
from fxamp.optim.borrow import needs_arguments
from fxamp.optim.clip import coefficient, require_max_norm
from fxamp.optim.first_steps import stepped
from fxamp.optim.guarded_step import BoundStep, Factors
from fxamp.optim.registry import guarded


@dataclass(frozen=True)
class StepSettings:
    """How one optimizer's step was compiled: see :func:`compile_optimizer`."""

    clip_norm: float | None
    lowering: str


_settings: "weakref.WeakKeyDictionary[torch.optim.Optimizer, StepSettings]" = weakref.WeakKeyDictionary()


def compile_optimizer(
    optimizer: torch.optim.Optimizer, clip_norm: float | None = None, lowering: str = "inductor"
) -> torch.optim.Optimizer:
    """Let ``optimizer.step()`` run compiled; returns the same object.

    The optimizer's own step is traced once for each kind of parameter, and runs as one program: a generated Triton
    kernel on a GPU, launched once for all parameters, or Inductor's code on a CPU. Its settings, state, ``state_dict``,
    hooks and schedulers stay what they are. The first step, which makes the state, and steps that cannot be traced are
    the optimizer's own; the log says why. Called again, it changes the settings.

    Args:
        optimizer: any; what it keeps and how it steps may be of a user's own.
        clip_norm: gradients count as if ``torch.nn.utils.clip_grad_norm_(parameters, clip_norm)`` had come before; they
            stay as they are in memory where the step is compiled. None: no clipping.
        lowering: "inductor", or "aot_eager" to run the traced ops one by one.

    Raises:
        OptionError: ``optimizer`` is no optimizer, or an argument has a value that is not accepted.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"compile_optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if lowering not in STEP_LOWERINGS:
        accepted = ", ".join(map(repr, STEP_LOWERINGS))
        raise OptionError(f"lowering={lowering!r}: expected one of {accepted}{nearest(str(lowering), STEP_LOWERINGS)}")
    if clip_norm is not None:
        require_max_norm(clip_norm, "clip_norm")
    if optimizer not in _settings:
        optimizer.step = MethodType(_compiled_step(optimizer.step), optimizer)  # type: ignore[method-assign]
    _settings[optimizer] = StepSettings(clip_norm, lowering)
    return optimizer


def clips(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's own ``step()`` clips gradients, so that nobody else may step in its place."""
    settings = _settings.get(optimizer)
    return settings is not None and settings.clip_norm is not None


def _compiled_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """The method that takes the place of ``original``, a bound ``step``; unwrapping it finds the class's."""

    @wraps(original)
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        settings = _settings[self]
        loss = None
        if closure is not None and not args and not kwargs and _calls_closure_first(self):
            with torch.enable_grad():
                loss = closure()
            closure = None
        arguments = closure is not None or bool(args or kwargs)
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        bound = _prepared(self, settings, scale is not None, found_inf is not None, arguments)
        if bound is None:
            _clip_in_memory(self, settings, scale)
            given = (closure, *args) if closure is not None or args else ()
            result = original(*given, **kwargs)
            stepped(self)
            return loss if loss is not None else result
        inverse = None if scale is None else scale.double().reciprocal().float().reshape(())
        bound(
            None if found_inf is None else found_inf.reshape(()),
            Factors(inverse, _coefficient(self, settings, inverse)),
        )
        stepped(self)
        return loss

    return step


def _prepared(
    optimizer: torch.optim.Optimizer, settings: StepSettings, scaled: bool, flagged: bool, arguments: bool
) -> BoundStep | None:
    if not any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
        return None
    step = guarded(optimizer, settings.lowering)
    return step.prepare(scaled, settings.clip_norm is not None, arguments, guarded=flagged)


def _calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step calls its closure once, before all else: as all of torch's do that can be called without."""
    return type(optimizer).__module__.startswith("torch.optim.") and not needs_arguments(optimizer)


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return [gradient for gradient in gradients if gradient is not None]


@torch.no_grad()
def _coefficient(optimizer: torch.optim.Optimizer, settings: StepSettings, inverse: Tensor | None) -> Tensor | None:
    """What true gradients are to be multiplied by: 0-dim float32 on their device; waits for nothing."""
    if settings.clip_norm is None:
        return None
    gradients = _gradients(optimizer)
    found, square = (torch.zeros((), dtype=torch.float32, device=gradients[0].device) for _ in range(2))
    check_(gradients, found, squared_norm=square)
    norm = square.sqrt() if inverse is None else square.sqrt() * inverse
    return coefficient(norm, settings.clip_norm)


@torch.no_grad()
def _clip_in_memory(optimizer: torch.optim.Optimizer, settings: StepSettings, scale: Tensor | None) -> None:
    """Clip for a step that the optimizer takes itself, whose gradients may hold a scale that it divides by."""
    if settings.clip_norm is None:
        return
    gradients = _gradients(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if scale is not None:
        torch._foreach_div_(gradients, scale)
        optimizer.grad_scale = None  # type: ignore[attr-defined]
    torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
