"""The error of one gradient: that of the first batch at the first weights, against the same model in float64."""

import math
from pathlib import Path

import torch

from fxamp.tools.bench.models import Batch, build
from fxamp.tools.bench.train.experiment import Experiment
from fxamp.tools.bench.train.training import BATCHES, Training, loss_of

#: A model with more parameters is not run in float64: its gradient alone would take gigabytes.
MOST_PARAMETERS = 2**28


class Reference:
    """The model and its first batch in float64, on the experiment's device, eager."""

    def __init__(self, experiment: Experiment) -> None:
        module, (batch, *_) = build(experiment.model, experiment.size, experiment.seed, BATCHES, experiment.changed)
        self.parameters = sum(parameter.numel() for parameter in module.parameters())
        self._module, self._batch, self._device = module, batch, experiment.device

    def write(self, file: Path) -> bool:
        """Write the gradient of every parameter to ``file``, in order; return False if the model is too large."""
        if self.parameters > MOST_PARAMETERS:
            return False
        module = self._module.to(self._device, torch.float64)
        wide = {name: value.double() if value.is_floating_point() else value for name, value in self._batch.items()}
        loss_of(module, {name: value.to(self._device) for name, value in wide.items()}).backward()  # type: ignore[no-untyped-call]
        gradients = (parameter.grad for parameter in module.parameters())
        torch.save([None if gradient is None else gradient.cpu() for gradient in gradients], file)
        return True


def gradient_error(training: Training, reference: Path) -> float | None:
    """Return the norm of the difference to the gradient in ``reference`` over that gradient's norm.

    The weights become what they were at first. Infinite where a gradient is not finite; None where the backward leaves
    none, because it steps the parameters itself.
    """
    experiment = training.experiment
    first, _ = build(experiment.model, experiment.size, experiment.seed, BATCHES, experiment.changed)
    parameters = list(training.module.parameters())
    with torch.no_grad():
        for parameter, initial in zip(parameters, first.parameters(), strict=True):
            parameter.copy_(initial)
    _backward(training, training.batches[0])
    if all(parameter.grad is None for parameter in parameters):
        return None
    off = whole = 0.0
    for parameter, true in zip(parameters, torch.load(reference), strict=True):
        ours, exact = (0.0 if value is None else value.double().cpu() for value in (parameter.grad, true))
        off += float(torch.as_tensor(ours - exact).square().sum())
        whole += float(torch.as_tensor(exact).square().sum())
    return math.sqrt(off / whole) if math.isfinite(off) else math.inf


def _backward(training: Training, batch: Batch) -> None:
    """Leave true gradients of a batch's loss in ``.grad``."""
    training.optimizer.zero_grad(set_to_none=True)
    training.scaler.scale(training.loss(batch)).backward()  # type: ignore[no-untyped-call]
    if training.scaler.is_enabled():
        training.scaler.unscale_(training.optimizer)
    training.wait()
