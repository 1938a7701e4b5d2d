"""fxamp.GradScaler: the contract of torch.amp.GradScaler, in generated kernels or inside the compiled backward."""

import weakref
from collections import defaultdict
from functools import reduce
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from fxamp.argument_names import named_arguments
from fxamp.kernels.gradient_request import ScaleRule
from fxamp.kernels.loss_scale_update import update_scale_
from fxamp.optim import clip
from fxamp.optim.compiled_optimizer import require_no_backward_steps
from fxamp.optim.gradients import Gradients, multiply_, reciprocal
from fxamp.optim.reading.layout import optimized_parameters
from fxamp.optim.shards import all_plain
from fxamp.policy import Policy
from fxamp.reports.idle import stepped
from fxamp.reports.nonfinite import NonFinite
from fxamp.reports.warnings import warn_once
from fxamp.scaler.graphs.distributed_wrappers import require_unscaled_shards
from fxamp.scaler.graphs.graph_flags import GraphFlags
from fxamp.scaler.outside_graphs.float16_scaling import begin, require_no_graphs
from fxamp.scaler.scale import map_tensors, set_scale_
from fxamp.scaler.torch_contract.gradient_check import check_gradients
from fxamp.scaler.torch_contract.optimizer_record import OptimizerRecord, StepResult, fresh_optimizer_state
from fxamp.scaler.torch_contract.overflows import OverflowLedger
from fxamp.scaler.torch_contract.rank_agreement import Ranks, agree, require_ranks
from fxamp.scaler.torch_contract.settings import ScaleBounds, SkipSettings, require_device, scaler_settings
from fxamp.scaler.torch_contract.step_outcomes import Outcomes
from fxamp.scaler.torch_contract.step_plan import StepCall, plan_step, will_clip
from fxamp.scaler.torch_contract.step_runs import run_step
from fxamp.torch_devices import moved
from fxamp.torch_private import untraced

T = TypeVar("T")

#: The device whose values the host knows without waiting.
_CPU = torch.device("cpu")

#: Scalers to which graphs were attached; weak references.
_attached: "weakref.WeakSet[GradScaler]" = weakref.WeakSet()

_UNUSED = (
    "a backward of a graph overflowed, and the program has not called the scaler in its options: the scale backs off "
    "only in that scaler's update(), so steps may be skipped forever; accepted: scale, step and update of the scaler "
    "in the options, not of another one such as torch.amp.GradScaler"
)


@named_arguments
class GradScaler(torch.amp.GradScaler):
    """Multiplies losses by a scale, detects overflowed gradients, skips their step, and adapts the scale.

    It subclasses :class:`torch.amp.GradScaler`, because libraries check ``isinstance``. It inherits plain data (setters
    and getters, ``load_state_dict``) and defines every method that touches losses, gradients or optimizers.

    Used alone, it works as torch's scaler does. If it is given to the backend (``torch.compile(model, backend="fxamp",
    options={"scaler": scaler})``), the compiled backward scales, unscales and checks, so ``.grad`` always holds
    unscaled gradients. The training loop does not change: :meth:`scale` then returns its input, :meth:`unscale_` only
    checks, and :meth:`get_scale` returns 1.0, the factor by which losses and gradients are multiplied outside the
    graphs. The factor inside the graphs is :attr:`loss_scale`.

    Differences from torch: growth tests ``tracker >= interval``, so the scale still grows after the interval was
    lowered; ``new_scale`` may be an int; a fused optimizer's first step waits for the device
    (``fxamp/scaler/torch_contract/step_plan.py``); ranks agree on a skip.

    Args:
        device: the device type of the losses, such as ``"cuda"`` or ``"cpu"``. ``"cuda"`` without an available CUDA
            device warns and disables the scaler.
        init_scale: the initial scale.
        growth_factor, growth_interval: the scale is multiplied by ``growth_factor`` after ``growth_interval``
            consecutive updates without an overflow.
        backoff_factor: the scale is multiplied by it after an overflow.
        enabled: False makes every method a no-op; ``step`` then only calls the optimizer's step.
        min_scale, max_scale: the limits of backoff and growth. None: no limit, as in torch, where the scale can reach
            0.0 and never recover.
        ranks: which ranks agree on a skip under torch.distributed: ``"world"``, a process group, or None: each rank
            decides alone. All these ranks must check their gradients (``unscale_`` or ``step``) equally often: not
            inside ``join()`` of DistributedDataParallel.
        skip: "host": ``step`` waits for the overflow flag, unless the optimizer is fused. "device": the optimizer's
            step is compiled once, and the device decides whether to skip. The first step, which creates the optimizer's
            state, still runs on the host; the log says, once, why any other step does. Gradients in memory stay scaled
            unless ``unscale_`` is called.
        graph_norm: compiled backwards also sum the squares of their gradients, so that :meth:`clip_grad_norm_` does
            not have to read them. Do not change gradients through ``.grad.data`` then: fxamp cannot detect it. Where
            torch.distributed has several ranks it reads them all the same, because collectives may have changed them.
        step_lowering: how compiled steps run: "inductor", or "aot_eager", op by op.

    Raises:
        AssertionError: ``growth_factor <= 1`` or ``backoff_factor >= 1``.
        OptionError: a bound is not positive and finite, ``init_scale`` is not positive or outside the bounds, or a
                string is unknown.
        ArgumentError: an argument has an unknown name.
    """

    _per_optimizer_states: defaultdict[int, OptimizerRecord]  # type: ignore[assignment]

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        ranks: Ranks = "world",
        skip: str = "host",
        graph_norm: bool = False,
        step_lowering: str = "inductor",
    ) -> None:
        require_device(device)
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._bounds = ScaleBounds(min_scale, max_scale)
        self.graph_norm = graph_norm
        if self._enabled:
            self._bounds.require(init_scale)
        require_ranks(ranks)
        self._skip_settings = SkipSettings(skip, step_lowering)
        self._ranks = ranks
        self.graphs = GraphFlags()
        self.used, self._unused = False, Outcomes()
        self._outcomes = Outcomes()
        self._ledger = OverflowLedger()
        self._per_optimizer_states = defaultdict(fresh_optimizer_state)

    @classmethod
    def from_policy(
        cls, policy: "Policy | str | PathLike[str]", device: str | None = None, **arguments: Any
    ) -> "GradScaler":
        """Return a scaler with the settings of a policy's ``[loss_scale]``; ``arguments`` override them.

        Without that table the scaler has the defaults, enabled for float16 and disabled for bfloat16. ``policy`` is a
        built-in name, a path or a Policy; ``device`` defaults to the policy's.

        Raises:
            PolicyError: the policy does not exist or is invalid.
        """
        return cls(**{**scaler_settings(policy, device), **arguments})

    # ---- the training loop ----

    @untraced
    def scale(self, outputs: T) -> T:
        """Return ``outputs`` times the scale: a Tensor, or a nested iterable whose lists and tuples keep their type.

        If the scaler is given to the backend, this returns ``outputs`` unchanged. Gradients in float16 outside the
        compiled graphs are then scaled, including those that ``torch.autograd.grad`` returns. A 0-dim float16 loss
        becomes float32.

        Raises:
            UnscaledError: float16 code outside the graphs that fxamp cannot follow, or graphs of another scaler; see
                ``fxamp/scaler/outside_graphs/float16_scaling.py``.
            ValueError: ``outputs`` holds something that is neither a tensor nor an iterable.
        """
        if not self._enabled:
            return outputs
        self.used = True
        scaled: T = map_tensors(outputs, self._scale_one)
        return scaled

    @untraced
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and check them; waits for no device.

        Call it at most once per optimizer and update, after the last backward, if you need to read the gradients;
        otherwise ``step`` does it. If the scaler is given to the backend, gradients are unscaled already, and this
        only checks them.

        Raises:
            AssertionError: nothing has been scaled yet.
            RuntimeError: called twice, or after ``clip_grad_norm_`` or ``step``, since the last update; or after a
                fused optimizer's ``step`` raised.
            ValueError: a gradient is float16.
        """
        if not self._enabled:
            return
        record = self._record(optimizer, "unscale_")
        self._unscale(optimizer, record, _gradients(optimizer))

    @untraced
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, return_skipped: bool = False, **kwargs: Any) -> Any:
        """Call ``optimizer.step(*args, **kwargs)`` unless a gradient overflowed; unscales the gradients first.

        Returns:
            The optimizer's return value; None if the step was skipped or is compiled. With ``return_skipped=True`` a
            :class:`StepResult` ``(value, skipped)``; this waits for the device if the device decides.

        Raises:
            AssertionError: nothing has been scaled yet, or no parameter of the optimizer has a gradient.
            OptionError: backwards step the optimizer's parameters.
            RuntimeError: called twice since the last update, or with a keyword ``closure``; or the last call raised
                inside a fused optimizer, which may have unscaled some of the gradients.
        """
        skipped: bool | Tensor = False
        if self._enabled:
            require_no_backward_steps(optimizer)
            value, skipped = self._checked_step(optimizer, args, kwargs)
        else:
            value = optimizer.step(*args, **kwargs)
        stepped(optimizer)
        return StepResult(value, bool(skipped)) if return_skipped else value

    def _checked_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, bool | Tensor]:
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        record, scale = self._record(optimizer, "step"), self._scale
        assert scale is not None
        gradients = _gradients(optimizer)
        call = StepCall(optimizer, gradients, record, args, kwargs)
        plan = plan_step(self._skip_settings, call, self.graphs.attached)
        if plan.unscale:
            self._unscale(optimizer, record, gradients) if record.clipped else self.unscale_(optimizer)
        elif plan.check:
            self._check(optimizer, gradients, None, allow_fp16=plan.way == "fused")
        if record.coefficient is not None and plan.compiled is None:
            multiply_(gradients, record.coefficient)
            record.coefficient = None
        inverse = self._inverse() if self._holds_scale(record) else None
        value, record.skipped = run_step(plan, call, self, scale, inverse)
        record.stage = OptState.STEPPED
        self._outcomes.record(record.skipped, scale.device)
        return value, record.skipped

    @untraced
    @torch.no_grad()
    def clip_grad_norm_(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip the optimizer's unscaled gradients to a common 2-norm of at most ``max_norm``; waits for no device.

        The norm comes from the check that the step needs anyway. With ``skip="device"`` the gradients in memory do not
        change: the step multiplies them as it reads them. Otherwise, and if hooks run before the step, they are
        unscaled and multiplied in place.

        A gradient that holds inf or NaN skips the step, as without clipping. So does a norm that overflows float32:
        a norm of the stored gradients, scaled or not, above 1.8e19. The scale then backs off.

        Returns:
            The norm before clipping, 0-dim float32 on the scale's device, as ``torch.nn.utils.clip_grad_norm_``.

        Raises:
            AssertionError: nothing has been scaled yet.
            OptionError: ``max_norm`` is not a number, or negative.
            RuntimeError: called after ``step``, or twice, since the last update.
            ValueError: a gradient is float16.
        """
        clip.require_max_norm(max_norm)
        gradients = _gradients(optimizer)
        if not self._enabled:
            return torch.nn.utils.clip_grad_norm_(gradients.parameters, max_norm)
        record = self._record(optimizer, "clip_grad_norm_")
        later = will_clip(self._skip_settings, optimizer, gradients, self._holds_scale(record))
        if not later and any(type(gradient) is not Tensor or gradient.is_sparse for gradient in gradients.gradients):
            # The norm of sharded gradients needs the other ranks, and sparse ones must be summed: torch does both.
            if record.stage is OptState.READY:
                self._unscale(optimizer, record, gradients)
            record.clipped = True
            return torch.nn.utils.clip_grad_norm_(gradients.parameters, max_norm)
        norm = self._norm(optimizer, record, gradients, later)
        record.clipped = True
        clip.flag_infinite_(record.found_inf_per_device.values(), norm)
        coefficient = clip.coefficient(norm, max_norm)
        if later:
            record.coefficient = coefficient
        else:
            multiply_(gradients, coefficient)
        return norm

    @untraced
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Back the scale off if a check found an overflow, else count towards growth; or set it to ``new_scale``.

        Call it once, after the steps of all optimizers; waits for no device.

        Args:
            new_scale: a number, or a one-element tensor on the scaler's device without grad. The bounds do not apply.

        Raises:
            AssertionError: nothing has been scaled yet, no gradients were checked, or ``new_scale`` is something else.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        if new_scale is None:
            records = self._per_optimizer_states.values()
            flags = [record.found_inf(scale.device) for record in records if record.found_inf_per_device]
            if not flags:
                raise AssertionError("No inf checks were recorded prior to update.")
            growth = self._growth_factor, self._backoff_factor, self._growth_interval
            rule = ScaleRule(*growth, self._bounds.min_scale, self._bounds.max_scale)
            update_scale_(scale, tracker, reduce(torch.add, flags), rule)
        else:
            set_scale_(scale, new_scale, self._device)
        self._per_optimizer_states = defaultdict(fresh_optimizer_state)
        self.graphs.clear()

    @untraced
    def get_scale(self) -> float:
        """Return the factor that ``scale`` multiplies losses by; gradients hold it until ``unscale_``.

        It is 1.0 if the scaler is disabled or given to the backend, so a loop that divides by it stays correct. Waits
        for the device.
        """
        return 1.0 if self._enabled and self.graphs.in_use(self) else super().get_scale()

    @property
    @untraced
    def loss_scale(self) -> float:
        """The scale, whether it is applied to losses or inside compiled backwards; waits for the device."""
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state: ``scale`` (the :attr:`loss_scale`), the growth settings, and ``_growth_tracker``."""
        state = super().state_dict()
        return state | {"scale": self.loss_scale} if state else state

    @property
    @untraced
    def skipped_steps(self) -> int:
        """The number of skipped calls of ``step`` so far, over all optimizers; waits for the device."""
        return self._outcomes.skipped_steps

    @property
    def stepped(self) -> Tensor | None:
        """Whether the last ``step`` was taken: 0-dim bool on the device, always the same memory; None before it."""
        return self._outcomes.stepped

    @untraced
    def poll_steps(self) -> list[bool]:
        """Return the outcomes of earlier steps that became known since the last poll: True for a step taken, in order.

        Waits for nothing. On a GPU an outcome is known when the device has finished that step, usually one step late.
        For example

            for stepped in scaler.poll_steps():
                if stepped:
                    scheduler.step()

        advances a schedule only for the steps that were taken. The last 256 outcomes are kept. Replayed CUDA graphs
        report only through :attr:`stepped`.
        """
        return self._outcomes.poll()

    @untraced
    def overflowed(self) -> dict[str, int]:
        """Return parameter name -> number of checks in which its gradient held an inf or NaN; waits for the device.

        Counts this rank only. A name is the one given to :meth:`name_parameters`, else the optimizer's
        (``optim.AdamW(model.named_parameters())``), else its position, such as ``"group0.param3"``. Counts are not
        saved.
        """
        return self._ledger.read()

    @property
    def overflows(self) -> tuple[NonFinite, ...]:
        """The ops whose scaled gradients overflowed in compiled backwards, with the parameters; waits for the device.

        Empty without option "nonfinite". See :attr:`fxamp.reports.Report.nonfinite`, which has these too.
        """
        return tuple(found for monitor in [*self.graphs.monitors.values()] for found in monitor.found() if found.scaled)

    @untraced
    def name_parameters(self, model: nn.Module, prefix: str = "") -> None:
        """Give :meth:`overflowed` the names of ``model.named_parameters(prefix=prefix)``.

        Raises:
            OptionError: a parameter of another model has one of these names.
        """
        self._ledger.names.add(model, prefix)

    # ---- what compiled graphs use: these, and ``graphs``, to which their backwards report ----

    def attach(self) -> None:
        """Let compiled backwards scale, unscale and check from now on.

        Raises:
            OptionError: a loss was scaled since the last update; its gradients would never be unscaled.
        """
        self.graphs.attach()
        _attached.add(self)

    def graph_scale(self, device: torch.device) -> Tensor:
        """Return the scale, 0-dim float32 on ``device``; created if necessary; 1.0 if the scaler is disabled."""
        if not self._enabled:
            return torch.ones((), dtype=torch.float32, device=device)
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return moved(self._scale, device)

    def note_unused(self, flags: Tensor) -> None:
        """Warn once if a backward has overflowed and nothing has called this scaler yet; waits for no device."""
        self._unused.record(flags.any(), flags.device)
        if False in self._unused.poll():
            warn_once(__name__, _UNUSED)

    # ---- inside ----

    def _scale_one(self, output: Tensor) -> Tensor:
        scale = self.graph_scale(output.device)
        if self.graphs.in_use(self):
            self.graphs.require_wrappers()
            return begin(output, self)
        if _attached:
            require_no_graphs(output, self)
        self.graphs.scaled_losses = True
        return output * scale

    def _record(self, optimizer: torch.optim.Optimizer, call: str) -> OptimizerRecord:
        """Return the optimizer's record, if ``call`` may come now; see :meth:`OptimizerRecord.require`."""
        self._check_scale_growth_tracker(call)
        record = self._per_optimizer_states[id(optimizer)]
        if self.graphs.attached and record.stage is OptState.READY:
            require_unscaled_shards(optimizer)
        self.used = True
        record.require(call)
        return record

    def _inverse(self) -> Tensor:
        scale, _ = self._check_scale_growth_tracker("unscale_")
        return reciprocal(scale)

    def _unscale(self, optimizer: torch.optim.Optimizer, record: OptimizerRecord, gradients: Gradients) -> None:
        self._check(optimizer, gradients, None if self.graphs.attached else self._inverse())
        record.stage = OptState.UNSCALED

    def _holds_scale(self, record: OptimizerRecord) -> bool:
        """Whether the optimizer's gradients in memory are still multiplied by the scale."""
        return record.stage is OptState.READY and not self.graphs.attached

    def _maybe_opt_step(  # type: ignore[override]
        self, optimizer: torch.optim.Optimizer, optimizer_state: OptimizerRecord, *args: Any, **kwargs: Any
    ) -> Any:
        """Step if no gradient overflowed, and record whether the step was skipped; waits for the device."""
        scale, _ = self._check_scale_growth_tracker("step")
        optimizer_state.skipped = bool(optimizer_state.found_inf(scale.device).item())
        return None if optimizer_state.skipped else optimizer.step(*args, **kwargs)

    def _norm(
        self, optimizer: torch.optim.Optimizer, record: OptimizerRecord, gradients: Gradients, later: bool
    ) -> Tensor:
        """Return the norm of the unscaled gradients, from the check if it is still due; ``later``: the step clips."""
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        if record.stage is OptState.UNSCALED:
            return clip.total_norm(clip.squares_of(_parameters(optimizer)), scale.device)
        square = self.graphs.square(gradients, scale.device)
        if square is not None:
            self._check(optimizer, gradients, None)
            norm = square.sqrt()
        else:
            squares: clip.Squares = []
            self._check(optimizer, gradients, None if later else self._inverse(), squares=squares)
            norm = clip.total_norm(squares, scale.device)
            if later and not self.graphs.attached:
                norm = norm * self._inverse()
        if not later:
            record.stage = OptState.UNSCALED
        return norm

    def _check(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: Gradients,
        inv_scale: Tensor | None,
        allow_fp16: bool = False,
        squares: clip.Squares | None = None,
    ) -> dict[Any, Tensor]:
        """Check an optimizer's gradients, agree with the other ranks, and record the flags, one per device."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        flags = self._flags(optimizer, gradients, inv_scale, allow_fp16, squares)
        agree(flags.values(), scale.device, self._ranks)
        self._per_optimizer_states[id(optimizer)].found_inf_per_device = flags
        return flags

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Any, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Check gradients, and unscale those that hold the scale, as torch's method does; records nothing."""
        flags = self._flags(optimizer, _gradients(optimizer), inv_scale, allow_fp16)
        return {device: flag + moved(found_inf, device) for device, flag in flags.items()}

    def _flags(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: Gradients,
        inv_scale: Tensor | None,
        allow_fp16: bool,
        squares: clip.Squares | None = None,
    ) -> dict[torch.device, Tensor]:
        if squares is None and self.graphs.clean(gradients):
            self._ledger.names.meet(optimizer)
            return {_CPU: torch.zeros((), dtype=torch.float32, device=_CPU)}
        if not allow_fp16 and torch.float16 in gradients.dtypes:
            raise ValueError("Attempting to unscale FP16 gradients.")
        groups = gradients.groups(by_spread=squares is not None)
        return check_gradients(optimizer, groups, inv_scale, self.graphs, self._ledger, squares)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        """Check gradients without changing them; optimizers that step on the device may call it."""
        return self._check(optimizer, _gradients(optimizer), None, allow_fp16=True)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle saves; AssertionError between an optimizer's check and the update."""
        state = super().__getstate__()
        if self._enabled:
            state["_init_scale"] = self.loss_scale
        for part in ("graphs", "used", "_unused", "_outcomes", "_ledger"):
            del state[part]
        # Pickles hold settings and numbers, not parts.
        return state | {"_skips": self.skipped_steps, "_scaled_losses": self.graphs.scaled_losses}

    def __setstate__(self, state: dict[str, Any]) -> None:
        numbers = {"_skips", "_scaled_losses"}
        super().__setstate__({name: value for name, value in state.items() if name not in numbers})
        self.graphs = GraphFlags(state["_scaled_losses"])
        self.used, self._unused = False, Outcomes()
        self._outcomes = Outcomes(state["_skips"])
        self._ledger = OverflowLedger()


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all of the optimizer's parameters; AssertionError if a group holds something that is not a tensor."""
    parameters = optimized_parameters(optimizer)
    if all_plain(parameters):
        return parameters
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise AssertionError(f"expected param to be torch.Tensor, got {type(parameter).__name__}")
    return parameters


def _gradients(optimizer: torch.optim.Optimizer) -> Gradients:
    return Gradients(_parameters(optimizer))
