"""The scaler's side of ``skip="device"``: steps that the device decides on, clipping that costs no pass."""

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from fxamp.optim import Factors, Prepared, guarded, has_pre_hooks
from fxamp.scaler import clipping, fused
from fxamp.scaler.borders import reciprocal
from fxamp.scaler.checks import parameters_with_gradients
from fxamp.scaler.graph_mode import GraphMode
from fxamp.scaler.outcomes import Outcomes
from fxamp.scaler.skip_choice import SkipChoice
from fxamp.scaler.state import require_whole, total_found_inf
from fxamp.scaler.untraced import untraced


class DeviceMode(GraphMode):
    """A scaler whose steps may be compiled; see :class:`fxamp.scaler.GradScaler`."""

    _choice: SkipChoice
    _outcomes: Outcomes

    @property
    def stepped(self) -> Tensor | None:
        """Whether the last ``step`` was taken: 0-dim bool on the device, the same memory each time; None before it."""
        return self._outcomes.stepped

    @untraced
    def poll_steps(self) -> list[bool]:
        """Return what has become known of earlier steps since the last poll: True for a step taken, oldest first.

        Waits for nothing: on a GPU an outcome is there when the device has come that far, usually one step late. So

            for stepped in scaler.poll_steps():
                if stepped:
                    scheduler.step()

        moves a schedule by just the steps that were taken. The last 256 outcomes are kept; those of replayed CUDA
        graphs are in :attr:`stepped` alone.
        """
        return self._outcomes.poll()

    @untraced
    @torch.no_grad()
    def clip_grad_norm_(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Scale the optimizer's true gradients so that their common 2-norm is at most ``max_norm``; waits for nothing.

        The norm comes out of the check that the step needs anyway. With ``skip="device"`` gradients stay as they are in
        memory: the step multiplies them as it reads them. Else they are unscaled, and multiplied in place.

        A gradient that holds inf or NaN skips the step, as without clipping; so does a norm beyond float32: of the
        gradients as they are, scaled or not, at 1.8e19. The scale backs off then.

        Returns:
            The norm before clipping, 0-dim float32 on the scale's device: ``torch.nn.utils.clip_grad_norm_``'s.

        Raises:
            AssertionError: nothing has been scaled yet.
            OptionError: ``max_norm`` is no number, or negative.
            RuntimeError: called after ``step``, or twice, since the last update.
            ValueError: a gradient is float16.
        """
        clipping.require_max_norm(max_norm)
        parameters = list(parameters_with_gradients(optimizer))
        if not self._enabled:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        self._check_scale_growth_tracker("clip_grad_norm_")
        state = self._per_optimizer_states[id(optimizer)]
        require_whole(optimizer, state)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("clip_grad_norm_() is being called after step().")
        if state["coefficient"] is not None:
            raise RuntimeError("clip_grad_norm_() has already been called on this optimizer since the last update().")
        if any(type(parameter.grad) is not Tensor or parameter.grad.is_sparse for parameter in parameters):
            return self._clip_by_torch(optimizer, state, parameters, max_norm)
        later = self._ready_to_compile(optimizer, state, clipped=True) is not None
        total = self._norm(optimizer, state, parameters, keep=later)
        clipping.flag_infinite_(state["found_inf_per_device"].values(), total)
        coefficient = clipping.coefficient(total, max_norm)
        if later:
            state["coefficient"] = coefficient
            return total
        clipping.multiply_(parameters, coefficient)
        return total

    def _clip_by_torch(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], parameters: list[Tensor], max_norm: float
    ) -> Tensor:
        """Sharded gradients need the other ranks' shards, and sparse ones a sum of their values, which torch knows."""
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def _norm(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], parameters: list[Tensor], keep: bool
    ) -> Tensor:
        """The true gradients' norm, out of the check if that is still to be made; ``keep``: they stay scaled."""
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        if state["stage"] is OptState.UNSCALED:
            return clipping.norm_of(parameters, scale.device).sqrt()
        alone = self._graph is None
        made = None if self._graph is None else self._graph.square(parameters, scale.device)
        if made is not None:
            self._check(optimizer, None, allow_fp16=False)
            if not keep:
                state["stage"] = OptState.UNSCALED
            return made.sqrt()
        square = torch.zeros((), dtype=torch.float32, device=scale.device)
        self._check(optimizer, None if keep else self._inverse(), allow_fp16=False, squared_norm=square)
        if not keep:
            state["stage"] = OptState.UNSCALED
        return square.sqrt() * self._inverse() if keep and alone else square.sqrt()

    def _inverse(self) -> Tensor:
        """1 / scale, 0-dim float32: in float64, rounded once, is what torch multiplies by; mps has no float64."""
        scale, _ = self._check_scale_growth_tracker("unscale_")
        return reciprocal(scale)

    def _ready_to_compile(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], clipped: bool, arguments: bool = False
    ) -> Prepared | None:
        """The optimizer's compiled step for gradients as they are; None where the host decides."""
        if self._choice.skip != "device" or fused.takes_scaler(optimizer):
            return None
        if next(parameters_with_gradients(optimizer), None) is None:
            return None
        scaled = state["stage"] is OptState.READY and self._graph is None
        if scaled and has_pre_hooks(optimizer):
            if clipped:
                return None
            self.unscale_(optimizer)
            scaled = False
        return guarded(optimizer, self._choice.lowering, self._choice.mode).prepare(scaled, clipped, arguments)

    def _step_compiled(self, optimizer: torch.optim.Optimizer, state: dict[str, Any], prepared: Prepared) -> None:
        """Check what is unchecked, and run the compiled step; the outcome is the device's."""
        scaled = state["stage"] is OptState.READY and self._graph is None
        if not state["found_inf_per_device"]:
            self._check(optimizer, None, allow_fp16=False)
        device = next(parameters_with_gradients(optimizer)).device
        found_inf = total_found_inf(state, device)
        inverse = self._inverse().to(device, non_blocking=True) if scaled else None
        coefficient = state["coefficient"]
        if coefficient is not None:
            coefficient = coefficient.to(device, non_blocking=True)
        prepared(found_inf, Factors(inverse, coefficient))
        state["skipped"] = found_inf

    def _settle(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Do to the gradients in memory what a compiled step would have done as it reads them."""
        if state["coefficient"] is None:
            return
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        clipping.multiply_(list(parameters_with_gradients(optimizer)), state["coefficient"])
        state["coefficient"] = None

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`fxamp.scaler.GradScaler.unscale_`."""
        raise NotImplementedError

    def _check(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor | None,
        allow_fp16: bool,
        squared_norm: Tensor | None = None,
    ) -> dict[Any, Tensor]:
        """See :meth:`fxamp.scaler.GradScaler._check`."""
        raise NotImplementedError
