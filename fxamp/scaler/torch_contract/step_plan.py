"""Who runs an optimizer's step, and what happens to the gradients in memory before it.

1. A compiled step, with ``skip="device"``, where the optimizer's step can be compiled and its state exists: it skips on
   the device, and unscales and clips gradients as it reads them.
2. The optimizer itself, if it takes torch's protocol of fused optimizers: a class with ``_step_supports_amp_scaling``
   finds ``self.grad_scale`` and ``self.found_inf``, and skips on the device. In an older form of the protocol, ``step``
   takes the scaler: ``step(grad_scaler=...)``; it divides by the scale, so it is not used with compiled graphs, whose
   gradients are unscaled.
3. The host, for any other step: it waits for the flag, and then calls the step or skips it.
"""

import inspect
import weakref
from collections.abc import Sequence
from functools import partial
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from fxamp.optim import BoundStep, CompiledOptimizer, StepOptions, has_pre_hooks
from fxamp.optim.gradients import Gradients
from fxamp.scaler.torch_contract.optimizer_record import OptimizerRecord
from fxamp.scaler.torch_contract.settings import SkipSettings


class StepCall(NamedTuple):
    """A call of ``GradScaler.step``: the optimizer, its gradients, its record, its arguments."""

    optimizer: torch.optim.Optimizer
    gradients: Gradients
    record: OptimizerRecord
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StepPlan(NamedTuple):
    """How one step runs.

    Attributes:
        way: "compiled", "fused", "older" (a step that takes the scaler) or "host".
        unscale: whether gradients are unscaled in memory first.
        check: whether they are checked as they are, because nothing else has checked them.
        compiled: the compiled step, if the way is "compiled".
        options: what ``compiled`` was prepared with.
        first: whether a fused step will create state: see :func:`lacks_state`.
    """

    way: str
    unscale: bool
    check: bool = False
    compiled: BoundStep | None = None
    options: StepOptions | None = None
    first: bool = False


def plan_step(settings: SkipSettings, call: StepCall, attached: bool) -> StepPlan:
    """Return the plan of a step; never waits for the device.

    ``settings``: whether steps run compiled, and how. ``attached``: whether compiled graphs unscale gradients.
    """
    optimizer, gradients, record = call.optimizer, call.gradients, call.record
    ready, clipped = record.stage is OptState.READY, record.coefficient is not None
    scaled, hooks = ready and not attached, False
    if _runs_compiled(settings, optimizer, gradients):
        # Hooks of the step read the gradients in memory.
        hooks = has_pre_hooks(optimizer)
        arguments = any(value is not None for value in (*call.args, *call.kwargs.values()))
        options = StepOptions(scaled and not hooks, clipped, True, settings.lowering)
        compiled = None
        if not (clipped and hooks):
            compiled = CompiledOptimizer.of(optimizer).prepare(options, arguments)
        if compiled is not None:
            return StepPlan("compiled", scaled and hooks, not record.found_inf_per_device, compiled, options)
    if not decides_itself(optimizer):
        return StepPlan("host", ready)
    unscale = (scaled and hooks) or (ready and clipped)
    if takes_scaler(optimizer):
        return StepPlan("host", ready) if attached else StepPlan("older", unscale)
    first = lacks_state(optimizer, gradients.parameters)
    # A first step is the most likely to raise. Unscale before it, so that the gradients' state stays known.
    unscale = unscale or (ready and first and torch.float16 not in gradients.dtypes)
    return StepPlan("fused", unscale, ready, first=first)


def will_clip(settings: SkipSettings, optimizer: torch.optim.Optimizer, gradients: Gradients, scaled: bool) -> bool:
    """Whether the optimizer's step will run compiled and clip gradients as it reads them: all have a gradient.

    If the last such step did, and gradients are plain tensors, nothing else is read: the step reads all when it runs,
    and if it cannot run compiled then, gradients are clipped in memory before it. Hooks before the step read gradients
    in memory, which are clipped there.
    """
    if not _runs_compiled(settings, optimizer, gradients) or has_pre_hooks(optimizer):
        return False
    compiled = CompiledOptimizer.of(optimizer)
    options = StepOptions(scaled, True, True, settings.lowering)
    return (gradients.plain and compiled.has_run(options)) or compiled.prepare(options) is not None


def _runs_compiled(settings: SkipSettings, optimizer: torch.optim.Optimizer, gradients: Gradients) -> bool:
    """Whether the optimizer's step should run compiled; preparing it tells whether it can.

    False for a ``step`` from ``compile_optimizer`` that clips: that step itself must be called.
    """
    if settings.skip != "device" or not gradients.gradients or takes_scaler(optimizer):
        return False
    compiled = CompiledOptimizer.known(optimizer)
    return compiled is None or compiled.clip_norm is None


def decides_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step takes the overflow flag and skips on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step uses the older form of the protocol."""
    function = getattr(optimizer.step, "__func__", None)
    answer = None if function is None else _takes_scaler.get(function)
    if answer is None:
        answer = "grad_scaler" in inspect.signature(optimizer.step).parameters
        if function is not None:
            _takes_scaler[function] = answer
    return answer


#: Cached per function: reading the signature takes longer than all other checks of a step.
_takes_scaler: "weakref.WeakKeyDictionary[Any, bool]" = weakref.WeakKeyDictionary()


def lacks_state(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Whether the next step creates state for a parameter that has none.

    torch's fused SGD (2.11 to 2.15) allocates a momentum buffer in its first step. If that step is skipped, the buffer
    stays uninitialised, and later steps use it as momentum. So the host must decide on a skip before such a step is
    called. An SGD group with ``momentum`` 0 keeps no state.
    """
    stateless = [group for group in optimizer.param_groups if group.get("momentum") == 0]
    if len(stateless) == len(optimizer.param_groups):
        return False
    without = {id(parameter) for group in stateless for parameter in group["params"]}
    kept = [parameter for parameter in parameters if id(parameter) not in without] if without else parameters
    return not all(map(_has_values, map(optimizer.state.get, kept)))


def _has_values(state: Any) -> bool:
    # Older versions of torch saved {"momentum_buffer": None} for SGD without momentum.
    return any(map(_is_some, state.values() if isinstance(state, dict) else [state]))


_is_some = partial(is_not, None)  # in C: it is called for each parameter in each step
