"""fxamp.GradScaler: torch.amp.GradScaler's whole contract, in generated kernels or inside the compiled backward."""

from collections import defaultdict
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from fxamp.policy import Policy
from fxamp.scaler import fused
from fxamp.scaler.device_mode import DeviceMode
from fxamp.scaler.distributed import Ranks, agree, require_ranks
from fxamp.scaler.from_policy import scaler_settings
from fxamp.scaler.names import OverflowLedger
from fxamp.scaler.optimizer_check import check_optimizer
from fxamp.scaler.outcomes import Outcomes
from fxamp.scaler.outputs import map_tensors
from fxamp.scaler.scale_update import adapt_scale_, set_scale_
from fxamp.scaler.skip_choice import SkipChoice
from fxamp.scaler.state import (
    ScaleBounds,
    SkipCount,
    StepResult,
    fresh_optimizer_state,
    require_whole,
    total_found_inf,
)
from fxamp.scaler.untraced import untraced

T = TypeVar("T")


class GradScaler(DeviceMode):
    """Multiplies losses by a scale, finds gradients that overflowed, skips their step, and adapts the scale.

    It is a :class:`torch.amp.GradScaler`, because libraries ask ``isinstance``: what is plain data there (constructor,
    accessors, ``state_dict``) is inherited, and all that touches losses, gradients or optimizers is defined here.

    Alone it works as torch's does. Given to the backend (``torch.compile(model, backend="fxamp", options={"scaler":
    scaler})``) the compiled backward scales, unscales and checks, so that ``.grad`` always holds true gradients: the
    training loop stays as it is, while :meth:`scale` returns its input and :meth:`unscale_` divides nothing.
    :meth:`get_scale` is 1.0 then, the factor that losses and gradients hold; the factor inside is :attr:`loss_scale`.

    Departures from torch: growth tests ``tracker >= interval``, so that a lowered interval still grows the scale;
    ``new_scale`` may be an int; a fused optimizer's first step waits (``fxamp/scaler/fused.py``); ranks agree.

    Args:
        device: type of the device that losses are on, such as ``"cuda"`` or ``"cpu"``. ``"cuda"`` where CUDA is not
            available: warns, and disables the scaler.
        init_scale: the first scale.
        growth_factor, growth_interval: the scale is multiplied so after so many updates in a row without an overflow.
        backoff_factor: what the scale is multiplied by after an overflow.
        enabled: False makes every method do nothing, and ``step`` call the optimizer.
        min_scale, max_scale: back-off and growth stop here. None: as in torch, which may end at 0.0, and never recover.
        ranks: who agrees on a skip under torch.distributed: ``"world"``, a process group, or None for each rank alone.
            Every rank of it must check its gradients (``unscale_`` or ``step``) equally often.
        skip: "host": ``step`` waits for the flag, unless the optimizer is fused. "device": the optimizer's own step is
            compiled once, and skips on the device, but for the first, which makes its state. The log says, once, why
            others are left to the host. Gradients stay scaled in memory without ``unscale_``.
        graph_norm: compiled backwards also sum the squares of their gradients, so that :meth:`clip_grad_norm_` need
            not read them. Do not change gradients through ``.grad.data`` then: nobody could tell.
        step_lowering: how compiled steps run: "inductor", or "aot_eager", op by op. ``step_mode``: Inductor's mode.

    Raises:
        AssertionError: ``growth_factor <= 1`` or ``backoff_factor >= 1``.
        OptionError: a bound is not positive and finite, ``init_scale`` is outside the bounds, or a word is unknown.
    """

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
        step_mode: str | None = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._bounds = ScaleBounds(min_scale, max_scale)
        self.graph_norm = graph_norm
        if self._enabled:
            self._bounds.require(init_scale)
        require_ranks(ranks)
        self._choice = SkipChoice(skip, step_lowering, step_mode)
        self._outcomes = Outcomes()
        self._ranks = ranks
        self._skips = SkipCount()
        self._ledger = OverflowLedger()
        self._per_optimizer_states = defaultdict(fresh_optimizer_state)

    @classmethod
    def from_policy(
        cls, policy: "Policy | str | PathLike[str]", device: str | None = None, **arguments: Any
    ) -> "GradScaler":
        """Return a scaler with the settings of a policy's ``[loss_scale]``; ``arguments`` of the constructor win.

        A policy without that table gives the defaults, enabled for float16 and disabled for bfloat16. ``policy`` is a
        built-in name, a path or a Policy; ``device`` is the policy's unless given.

        Raises:
            PolicyError: the policy does not exist or is mistaken.
        """
        return cls(**{**scaler_settings(policy, device), **arguments})

    # ---- the training loop ----

    @untraced
    def scale(self, outputs: T) -> T:
        """Return ``outputs`` times the scale: a Tensor, or a nested iterable whose lists and tuples keep their type.

        Given to the backend: returns ``outputs`` as they are, and lets gradients in float16 that are outside of
        compiled graphs hold the scale; those that ``torch.autograd.grad`` returns too. A 0-dim float16 loss becomes
        float32.

        Raises:
            UnscaledError: float16 outside of the graphs cannot be followed; see ``fxamp/scaler/float16_flow.py``.
            ValueError: ``outputs`` holds something that is neither a tensor nor an iterable.
        """
        if not self._enabled:
            return outputs
        scaled: T = map_tensors(outputs, self._scale_one)
        return scaled

    @untraced
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and check them; waits for no device.

        Call it once per optimizer and update, after the last backward, where gradients are to be read; else ``step``
        does it. Given to the backend: gradients are true already, and are checked only.

        Raises:
            AssertionError: nothing has been scaled yet.
            RuntimeError: called twice, or after ``step``, since the last update; or after a ``step`` that raised inside
                of a fused optimizer.
            ValueError: a gradient is float16.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        require_whole(optimizer, state)
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._check(optimizer, self._inverse(), allow_fp16=False)
        state["stage"] = OptState.UNSCALED

    @untraced
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, return_skipped: bool = False, **kwargs: Any) -> Any:
        """Call ``optimizer.step(*args, **kwargs)`` unless a gradient overflowed; gradients are unscaled before.

        Returns:
            What the optimizer returned; None if the step was skipped or is compiled. With ``return_skipped=True`` a
            :class:`StepResult` ``(value, skipped)``, which waits for the device where that decides.

        Raises:
            AssertionError: nothing has been scaled yet, or no parameter of the optimizer has a gradient.
            RuntimeError: called twice since the last update, or with a keyword ``closure``; or the last call raised
                inside of a fused optimizer, which may have unscaled some of the gradients.
        """
        if not self._enabled:
            value = optimizer.step(*args, **kwargs)
            return StepResult(value, False) if return_skipped else value
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        require_whole(optimizer, state)
        value = self._step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        self._skips.add(state["skipped"])
        self._outcomes.record(state["skipped"], scale.device)
        return StepResult(value, bool(state["skipped"])) if return_skipped else value

    @untraced
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Back the scale off if a check found an overflow, else count towards its growth; or set it to ``new_scale``.

        Call it once, after the steps of all optimizers; waits for no device.

        Args:
            new_scale: a number, or a tensor of one element on the scaler's device without grad; the bounds do not hold.

        Raises:
            AssertionError: nothing has been scaled yet, no gradients were checked, or ``new_scale`` is something else.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        if new_scale is None:
            rule = self._growth_factor, self._backoff_factor, self._growth_interval
            adapt_scale_(scale, tracker, self._per_optimizer_states.values(), rule, self._bounds)
        else:
            set_scale_(scale, new_scale, self._device)
        self._per_optimizer_states = defaultdict(fresh_optimizer_state)
        self._scaled_losses = False
        if self._graph is not None:
            self._graph.clear()

    @property
    @untraced
    def skipped_steps(self) -> int:
        """How many calls of ``step`` were skipped so far, those of all optimizers together; waits for the device."""
        return self._skips.read()

    @untraced
    def overflowed(self) -> dict[str, int]:
        """Return parameter name -> in how many checks its gradient held an inf or NaN; waits for the device.

        This rank's. A name is the one given to :meth:`name_parameters`, else the optimizer's own
        (``optim.AdamW(model.named_parameters())``), else its place, as ``"group0.param3"``. The counts are not saved.
        """
        return self._ledger.read()

    @untraced
    def name_parameters(self, model: nn.Module, prefix: str = "") -> None:
        """Give :meth:`overflowed` the names of ``model.named_parameters(prefix=prefix)``.

        Raises:
            OptionError: another model's parameter has one of these names.
        """
        self._ledger.names.give(model, prefix)

    # ---- inside ----

    def _step(self, optimizer: torch.optim.Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        clipped = state["coefficient"] is not None
        given = any(value is not None for value in (*args, *kwargs.values()))
        prepared = self._ready_to_compile(optimizer, state, clipped, arguments=given)
        if prepared is not None:
            return self._step_compiled(optimizer, state, prepared)
        self._settle(optimizer, state)
        step = self._step_on_device if fused.decides_itself(optimizer) else self._step_on_host
        return step(optimizer, state, *args, **kwargs)

    def _step_on_host(self, optimizer: torch.optim.Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        return self._maybe_opt_step(optimizer, state, *args, **kwargs)

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        scale, _ = self._check_scale_growth_tracker("step")
        optimizer_state["skipped"] = bool(total_found_inf(optimizer_state, scale.device).item())
        return None if optimizer_state["skipped"] else optimizer.step(*args, **kwargs)

    def _step_on_device(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        scale, _ = self._check_scale_growth_tracker("step")
        if fused.takes_scaler(optimizer):
            # Such an optimizer divides by the scale, which gradients from compiled graphs do not hold.
            if self._graph is not None:
                return self._step_on_host(optimizer, state, *args, **kwargs)
            value = fused.step_with_scaler(optimizer, self, args, kwargs)
            state["skipped"] = total_found_inf(state, scale.device)
            return value
        first = fused.lacks_state(optimizer)
        if state["stage"] is OptState.READY and first and not fused.has_float16_gradients(optimizer):
            # First steps are those that raise. Then it must be known what the gradients hold.
            self.unscale_(optimizer)
        scaled = state["stage"] is OptState.READY and self._graph is None
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        found_inf = total_found_inf(state, scale.device)
        # Until the step is through, some of the gradients may be unscaled, and nobody can tell which.
        state["half_unscaled"] = scaled
        value, state["skipped"] = fused.step(optimizer, found_inf, scale if scaled else None, first, args, kwargs)
        state["half_unscaled"] = False
        return value

    def _check(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor | None,
        allow_fp16: bool,
        squared_norm: Tensor | None = None,
    ) -> dict[Any, Tensor]:
        """Check an optimizer's gradients, agree with the other ranks, and record the flags, one per device."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        flags = self._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16, squared_norm)
        agree(flags.values(), scale.device, self._ranks)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Any,
        found_inf: Tensor,
        allow_fp16: bool,
        *norm: Tensor | None,
    ) -> dict[torch.device, Tensor]:
        return check_optimizer(optimizer, found_inf, inv_scale, self._graph, self._ledger, allow_fp16, *norm)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        """Check gradients and leave them as they are; optimizers that step on the device may call it."""
        return self._check(optimizer, None, allow_fp16=True)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle saves; AssertionError between an optimizer's check and the update."""
        state = super().__getstate__()
        if self._enabled:
            state["_init_scale"] = self.loss_scale
        state["_skips"] = SkipCount(self.skipped_steps)
        del state["_ledger"], state["_outcomes"]
        state["_graph"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._ledger = OverflowLedger()
        self._outcomes = Outcomes()
