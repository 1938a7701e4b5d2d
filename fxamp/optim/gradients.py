"""Find an optimizer's gradients, DTensors and sparse ones too, and group them: one call of a kernel per group.

The kernels sort the gradients by dtype.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fxamp.optim.shards import WHOLE, Spread, all_plain, local, settle_gradient, spread_of
from fxamp.torch_devices import moved


@dataclass(frozen=True)
class GradientGroup:
    """The gradients on one device, checked in one call, and the parameters they belong to.

    ``spread``: how they are split between ranks, where the groups are made so that their squares can be summed.
    """

    device: torch.device
    spread: Spread = WHOLE
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def part(self, places: Sequence[int]) -> "GradientGroup":
        """Return the members at ``places``."""
        if len(places) == len(self.gradients):
            return self
        parameters, gradients = ([members[at] for at in places] for members in (self.parameters, self.gradients))
        return GradientGroup(self.device, self.spread, parameters, gradients)


def group_gradients(parameters: Iterable[Tensor], by_spread: bool = False) -> list[GradientGroup]:
    """Group the parameters' gradients by device, and ``by_spread``: by how they are split between ranks.

    The groups ``by_spread`` are the same on all ranks if ``parameters`` are; parameters may have no gradient then. A
    group holds plain tensors: a sparse gradient's values, a DTensor's local shard. A float16 sparse gradient is
    coalesced first, and the result replaces it: summing the values of one index is where scaled float16 overflows, so
    the check must see the sums.
    """
    parameters = list(parameters)
    gradients = list(map(attrgetter("grad"), parameters))
    devices = set(map(attrgetter("device"), parameters))
    if len(devices) == 1 and stored_as_they_are(parameters, gradients):
        return [GradientGroup(devices.pop(), WHOLE, parameters, gradients)]
    groups: dict[tuple[torch.device, Spread], GradientGroup] = {}
    for parameter in parameters:
        gradient = settle_gradient(parameter) if by_spread else parameter.grad
        spread = spread_of(parameter) if by_spread else WHOLE
        if gradient is not None and gradient.is_sparse:
            if gradient.dtype == torch.float16:
                gradient = parameter.grad = gradient.coalesce()
            stored: Any = gradient._values()
        else:
            stored = local(gradient)
        device = parameter.device if stored is None else stored.device
        group = groups.setdefault((device, spread), GradientGroup(device, spread))
        if stored is not None:
            group.parameters.append(parameter)
            group.gradients.append(stored)
    return list(groups.values())


def stored_as_they_are(parameters: Sequence[Tensor], gradients: Sequence[Any]) -> bool:
    """Whether each parameter has a gradient, and all are plain dense tensors: the usual case, decided fast."""
    if not all_plain(parameters) or not all_plain(gradients):
        return False
    return {torch.strided}.issuperset(map(attrgetter("layout"), gradients))


def multiply_(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply the parameters' gradients by ``factor`` in place, in one foreach op for each device and dtype."""
    for group in group_gradients(parameters):
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in group.gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for members in by_dtype.values():
            torch._foreach_mul_(members, moved(factor, group.device))
