"""The scaler's compiled steps: with ``skip="device"`` the optimizer's own step runs compiled, and the device skips."""

import torch
from torch import Tensor

from fxamp.optim import BoundStep, Factors, clips, guarded, has_pre_hooks
from fxamp.scaler import fused
from fxamp.scaler.checks import parameters_with_gradients
from fxamp.scaler.skip_choice import SkipChoice
from fxamp.scaler.state import OptimizerRecord


class CompiledSteps:
    """Owned by one scaler. Says which steps run compiled, and runs them; waits for no device.

    ``choice``: whether any do, and how they are compiled.
    """

    def __init__(self, choice: SkipChoice) -> None:
        self.choice = choice

    def requested(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's step is to run compiled; :meth:`prepare` says whether it can.

        Never in the place of a ``step`` that clips, as ``compile_optimizer`` makes it: it has to be called.
        """
        if self.choice.skip != "device" or fused.takes_scaler(optimizer) or clips(optimizer):
            return False
        return next(parameters_with_gradients(optimizer), None) is not None

    def needs_true_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether gradients must be unscaled in memory before a compiled step: hooks read them there."""
        return has_pre_hooks(optimizer) and self.requested(optimizer)

    def prepare(
        self, optimizer: torch.optim.Optimizer, scaled: bool, clipped: bool, arguments: bool = False
    ) -> BoundStep | None:
        """Return the optimizer's compiled step, compiled now if need be; None where the host decides.

        Args:
            optimizer: its gradients are as the step will find them.
            scaled: whether they hold the scale, which the step divides by.
            clipped: whether the step multiplies them by a clip coefficient.
            arguments: whether the caller gives the step arguments, such as a closure.
        """
        if not self.requested(optimizer) or (scaled and has_pre_hooks(optimizer)):
            return None
        return guarded(optimizer, self.choice.lowering, self.choice.mode).prepare(scaled, clipped, arguments)

    def run(
        self,
        step: BoundStep,
        optimizer: torch.optim.Optimizer,
        record: OptimizerRecord,
        inv_scale: Tensor | None,
    ) -> Tensor:
        """Run a compiled step on checked gradients; return its flag, 0-dim float32, nonzero if the step was skipped.

        ``inv_scale``: 0-dim float32 that gradients are multiplied by as the step reads them; None: they are true.
        """
        device = next(parameters_with_gradients(optimizer)).device
        found_inf = record.found_inf(device)
        inverse, coefficient = (
            None if factor is None else factor.to(device, non_blocking=True)
            for factor in (inv_scale, record.coefficient)
        )
        step(found_inf, Factors(inverse, coefficient))
        return found_inf
