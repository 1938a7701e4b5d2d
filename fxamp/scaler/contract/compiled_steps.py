"""The scaler's compiled steps: with ``skip="device"`` the step is compiled, and the device decides whether to skip."""

import torch
from torch import Tensor

from fxamp.optim import BoundStep, Factors, clips, guarded, has_pre_hooks
from fxamp.scaler.contract import fused
from fxamp.scaler.contract.gradients import parameters_with_gradients
from fxamp.scaler.contract.skip_choice import SkipChoice
from fxamp.scaler.contract.state import OptimizerRecord
from fxamp.torch_devices import moved


class CompiledSteps:
    """Owned by one scaler. Decides which steps run compiled, and runs them; never waits for the device.

    ``choice``: whether steps run compiled, and how they are compiled.
    """

    def __init__(self, choice: SkipChoice) -> None:
        self.choice = choice

    def requested(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's step should run compiled; :meth:`prepare` says whether it can.

        False for a ``step`` from ``compile_optimizer`` that clips: that step itself must be called.
        """
        if self.choice.skip != "device" or fused.takes_scaler(optimizer) or clips(optimizer):
            return False
        return next(parameters_with_gradients(optimizer), None) is not None

    def needs_true_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether gradients must be unscaled in memory before a compiled step, because step hooks read them."""
        return has_pre_hooks(optimizer) and self.requested(optimizer)

    def prepare(
        self, optimizer: torch.optim.Optimizer, scaled: bool, clipped: bool, arguments: bool = False
    ) -> BoundStep | None:
        """Return the optimizer's compiled step, compiling it if necessary; None if the host must decide.

        Args:
            optimizer: its gradients must be in the state in which the step will read them.
            scaled: whether the gradients are scaled; the step then multiplies them by the inverse scale.
            clipped: whether the step multiplies them by a clip coefficient.
            arguments: whether the caller passes arguments to the step, such as a closure.
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

        ``inv_scale``: 0-dim float32 by which the step multiplies gradients as it reads them; None: they are unscaled.
        """
        device = next(parameters_with_gradients(optimizer)).device
        found_inf = record.found_inf(device)
        inverse, coefficient = (
            None if factor is None else moved(factor, device) for factor in (inv_scale, record.coefficient)
        )
        step(found_inf, Factors(inverse, coefficient))
        return found_inf
