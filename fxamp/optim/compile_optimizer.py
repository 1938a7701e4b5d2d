"""``compile_optimizer``: make an optimizer's ``step()`` run as one compiled program for all parameters."""

from collections.abc import Callable
from functools import partial, wraps
from os import PathLike
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from fxamp.argument_names import named_arguments
from fxamp.errors import OptionError, require_choice
from fxamp.lowering_names import STEP_LOWERINGS
from fxamp.optim.bound_step import has_pre_hooks, own_step, run_pre_hooks
from fxamp.optim.clip import require_max_norm
from fxamp.optim.compiled_optimizer import CompiledOptimizer
from fxamp.optim.gradients import reciprocal
from fxamp.optim.in_backward import steps_in_backward
from fxamp.optim.precision.state_precision import complete_state, unpack_state
from fxamp.optim.programs.lowering import StepOptions
from fxamp.optim.reading.layout import optimized_parameters
from fxamp.optim.tracing.stand_ins import needs_arguments, replaced_step
from fxamp.policy import Policy
from fxamp.reports.idle import stepped


@named_arguments
def compile_optimizer(
    optimizer: torch.optim.Optimizer,
    policy: "Policy | str | PathLike[str] | None" = None,
    clip_norm: float | None = None,
    lowering: str = "inductor",
    *,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Make ``optimizer.step()`` run compiled; returns the same object.

    The optimizer's own step is traced once for each kind of parameter. It then runs as one program: a generated Triton
    kernel on a GPU, launched once for all parameters, or Inductor's code on a CPU. Settings, state, ``state_dict``,
    hooks and schedulers work as before. The first step, which creates the state, and steps that cannot be traced run
    uncompiled; the log says why. Calling this function again changes the arguments.

    Args:
        optimizer: any optimizer, including user-defined ones.
        policy: a Policy, a built-in name or a path, whose ``[optimizer]`` table sets the precision of the state. None
            keeps the state as the optimizer creates it. ``state_dict()`` returns ordinary tensors either way; of packed
            state, or state with counters that are numbers, it is a copy, which later steps do not change. With
            ``in_backward = true``, backwards compiled with this policy step their parameters, whose ``.grad`` stays
            None. Call ``step()`` once after each backward: it steps the other parameters.
        clip_norm: the step clips gradients as ``torch.nn.utils.clip_grad_norm_(parameters, clip_norm)`` would. If the
            step runs compiled, without hooks before it, and does not write to gradients, the gradients in memory do
            not change. None: no clipping.
        lowering: "inductor", or "aot_eager" to run the traced ops one by one.
        seed: the seed of stochastic rounding; the same on every rank, unless ranks are to round differently.

    Raises:
        PolicyError: the policy does not exist, or has a mistake.
        OptionError: ``optimizer`` is not an optimizer, or an argument has a value that is not accepted, or the policy's
            ``in_backward`` does not support the optimizer or the other arguments.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"compile_optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    require_choice("lowering", lowering, STEP_LOWERINGS)
    if clip_norm is not None:
        require_max_norm(clip_norm, "clip_norm")
    loaded = policy if policy is None or isinstance(policy, Policy) else Policy.load(policy)
    asked = steps_in_backward(optimizer, loaded, clip_norm is not None)
    compiled = CompiledOptimizer.of(optimizer)
    compiled.step_in_backward(asked)
    if compiled.own is None:
        optimizer.step = MethodType(_compiled_step(optimizer.step), optimizer)  # type: ignore[method-assign]
    compiled.keep_state(None if loaded is None else loaded.optimizer, seed)
    compiled.own, compiled.clip_norm = StepOptions(clipped=clip_norm is not None, lowering=lowering), clip_norm
    return optimizer


def _compiled_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that replaces ``original``, a bound ``step``; ``__wrapped__`` leads to the class's step."""

    @wraps(original)
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        compiled, loss, uncompiled = CompiledOptimizer.known(self), None, original
        assert compiled is not None and compiled.own is not None, "a copy of an optimizer has no such step"
        hooks = has_pre_hooks(self)
        if closure is not None and not args and not kwargs and _calls_closure_first(self, hooks):
            if hooks:
                run_pre_hooks(self)
                hooks, uncompiled = False, partial(own_step, self)
            with torch.enable_grad():
                loss = closure()
            closure = None
        if compiled.backward_step is not None:
            compiled.backward_step.close()
        arguments = closure is not None or bool(args or kwargs)
        clip_norm = compiled.clip_norm
        if hooks:
            _clip_in_memory(self, clip_norm)
            clip_norm = None
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        options = StepOptions(scale is not None, clip_norm is not None, found_inf is not None, compiled.own.lowering)
        bound = compiled.prepare(options, arguments) if _has_gradients(self) else None
        if bound is not None and hooks:
            run_pre_hooks(self)
            bound, uncompiled = compiled.prepare(options), partial(own_step, self)
        if bound is None:
            positional = (closure, *args) if closure is not None or args else ()
            result = _step_uncompiled(self, compiled, clip_norm, partial(uncompiled, *positional, **kwargs))
            loss = result if loss is None else loss
        else:
            inverse = None if scale is None else reciprocal(scale).reshape(())
            bound(None if found_inf is None else found_inf.reshape(()), bound.clipping(clip_norm, inverse))
        stepped(self)
        return loss

    return step


def _step_uncompiled(
    optimizer: torch.optim.Optimizer, compiled: CompiledOptimizer, clip_norm: float | None, run: Callable[[], Any]
) -> Any:
    """Return what ``run``, the optimizer's own step, returns; its gradients are clipped, and its state is unpacked."""
    unpack_state(optimizer)
    _clip_in_memory(optimizer, clip_norm)
    result = run()
    if compiled.precision is not None:
        complete_state(optimizer, compiled.precision.table)
    return result


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in optimized_parameters(optimizer))


def _calls_closure_first(optimizer: torch.optim.Optimizer, hooks: bool) -> bool:
    """Whether the step calls its closure once, before anything else, as all of torch's do for which it is optional.

    False if ``hooks`` run before the closure and the step was replaced, because only the new step can call them.
    """
    first = type(optimizer).__module__.startswith("torch.optim.") and not needs_arguments(optimizer)
    return first and not (hooks and replaced_step(optimizer))


@torch.no_grad()
def _clip_in_memory(optimizer: torch.optim.Optimizer, clip_norm: float | None) -> None:
    """Clip the gradients in memory before an uncompiled step and before hooks; unscale them first."""
    if clip_norm is None:
        return
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    parameters = optimized_parameters(optimizer)
    if scale is not None:
        torch._foreach_div_([parameter.grad for parameter in parameters if parameter.grad is not None], scale)
        optimizer.grad_scale = None  # type: ignore[attr-defined]
    torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
