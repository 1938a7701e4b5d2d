"""The error of a policy's gradient against float64, over a few draws of nearby weights.

Every draw multiplies each parameter by numbers within 2**-8 of 1: the model stays the same, its rounding is another.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from fxamp.errors import ListingError
from fxamp.policy import Policy
from fxamp.policy.model.keep import KEPT
from fxamp.tools.common.silence import quiet, unlogged
from fxamp.tools.inputs.measurement import Batch, Copy, Results, failure, relative, under_policy
from fxamp.tools.policy.batches import Workload
from fxamp.tools.policy.fit.store import Store

DRAWS = 2


@dataclass
class Measuring:
    """Runs the model of ``work`` on ``batches`` under one policy after another, by the kernels of its own device."""

    work: Workload
    batches: tuple[Batch, ...]
    store: Store
    draws: range = range(DRAWS)
    fresh: int = 0
    _exact: dict[int, Results] = field(default_factory=dict)

    def error(self, policy: Policy) -> float:
        """Return the relative error of all gradients as one vector, in the 2-norm: the root mean square over draws."""
        key = ("error", policy.digest, len(self.batches), tuple(self.draws))
        known = self.store.get(*key)
        if known is None:
            errors = [self._draw(policy, draw) for draw in self.draws]
            known = math.sqrt(sum(error**2 for error in errors) / len(errors))
            self.store.put(known, *key)
            self.fresh += 1
        return float(known)

    def _draw(self, policy: Policy, draw: int) -> float:
        lowered = any(policy.has_rules_for(region) for region in ("backward", KEPT))
        with _nearby(self.work.model, draw), unlogged("fxamp"):
            exact = self._float64(draw)
            copy = Copy.of(self.work.model, self.batches)
            lowering = "aot_eager" if lowered else "eager"
            beside = self.work.loss.function
            results, _ = under_policy(self.work.file, copy, policy, lowering, self.work.start, beside)
        return relative([*results.gradients_of(exact).values()], [*exact.gradients.values()])

    def _float64(self, draw: int) -> Results:
        """Return the gradients in float64. Raises ListingError if there are none, or none that are finite."""
        if draw not in self._exact:
            file, copy = self.work.file, Copy.of(self.work.model, self.batches, dtype=torch.float64)
            try:
                with quiet():
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
    parameters = list(model.parameters()) if isinstance(model, nn.Module) and draw else []
    before = [value.detach().clone() for value in parameters]
    generator = torch.Generator().manual_seed(draw)
    with torch.no_grad():
        for value in parameters:
            factors = torch.rand(value.shape, generator=generator).sub_(0.5).mul_(2.0**-7).add_(1)
            value.mul_(factors.to(value.device, value.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for value, old in zip(parameters, before, strict=True):
                value.copy_(old)
