"""The error of a policy's gradient against float64, over a few draws of nearby weights.

Every draw multiplies each parameter by numbers within 2**-8 of 1: the model hardly changes, but it rounds differently.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from fxamp.errors import ListingError
from fxamp.policy import Policy
from fxamp.tools.common.silence import quiet, unlogged
from fxamp.tools.inputs.measurement import Batch, Copy, Results, each_under_policy, failure, lowering_of, real, relative
from fxamp.tools.policy.batches import Workload

DRAWS = 2


@dataclass
class Measuring:
    """Runs the model of ``work`` on ``batches`` under one policy after another, by the kernels of its own device."""

    work: Workload
    batches: tuple[Batch, ...]
    draws: range = range(DRAWS)
    _known: dict[str, float] = field(default_factory=dict)
    _exact: dict[int, Results] = field(default_factory=dict)

    def error(self, policy: Policy) -> float:
        """Return the relative error of all gradients as one vector, in the 2-norm: the root mean square over draws."""
        if policy.digest not in self._known:
            errors = self._errors(policy)
            self._known[policy.digest] = math.sqrt(sum(one**2 for one in errors) / len(errors))
        return self._known[policy.digest]

    def _errors(self, policy: Policy) -> list[float]:
        """Return the error of each draw; the model is compiled once."""
        work, copy = self.work, Copy.of(self.work.model, self.batches)
        draws = [_nearby(copy.model, draw) for draw in self.draws]
        with unlogged():
            outcomes = each_under_policy(
                work.file, copy, policy, lowering_of(policy), work.start, draws, work.loss.function
            )
        pairs = [(results, self._float64(draw)) for (results, _), draw in zip(outcomes, self.draws, strict=True)]
        return [
            relative([*results.gradients_of(exact).values()], [*exact.gradients.values()]) for results, exact in pairs
        ]

    def _float64(self, draw: int) -> Results:
        """Return the gradients in float64. Raises ListingError if there are none, or none that are finite."""
        if draw not in self._exact:
            file, copy = self.work.file, Copy.of(self.work.model, self.batches, dtype=torch.float64)
            try:
                with quiet(), _nearby(copy.model, draw):
                    exact = copy.run(copy.model, self.work.start, beside=self.work.loss.function)
            except Exception as error:
                raise failure(file, "running model in float64", error) from error
            if not exact.finite or not any(bool(value.any()) for value in exact.gradients.values()):
                raise ListingError(
                    f"{file}: in float64 the gradients are not finite, or all are zero; accepted: a loss that depends "
                    "on parameters"
                )
            self._exact[draw] = exact
        return self._exact[draw]


@contextmanager
def _nearby(model: object, draw: int) -> Iterator[None]:
    """Within the block, the parameters are those of ``draw``; 0 is the model's own."""
    parameters = [real(value) for value in model.parameters()] if isinstance(model, nn.Module) and draw else []
    before = [value.detach().clone() for value in parameters]
    generator = torch.Generator().manual_seed(draw)
    with torch.no_grad():
        for value in parameters:
            factors = torch.rand(value.shape, generator=generator).sub_(0.5).mul_(2.0**-7).add_(1)
            value.copy_((value.float() * factors.to(value.device)).to(value.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for value, old in zip(parameters, before, strict=True):
                value.copy_(old)
