"""Find an optimizer's gradients, including DTensors and sparse ones, and group them for one kernel call per group.

The kernels group the gradients by dtype themselves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fxamp.optim.shards import WHOLE, Spread, all_plain, local, settle_gradient, spread_of
from fxamp.torch_devices import moved
from fxamp.torch_dtypes import widest_float

_grad, _device, _dtype, _layout = map(attrgetter, ("grad", "device", "dtype", "layout"))


class Gradients:
    """An optimizer's gradients at one moment, read once for everything that one call of the scaler needs.

    Attributes:
        parameters: those that have a gradient.
        gradients: their gradients, in the same order.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]

    def __init__(self, every: Sequence[Tensor]) -> None:
        """``every``: all of the optimizer's parameters."""
        self._every = every
        gradients = list(map(_grad, every))
        self.gradients = [gradient for gradient in gradients if gradient is not None]
        if len(self.gradients) == len(every):
            self.parameters = list(every)
        else:
            pairs = zip(every, gradients, strict=True)
            self.parameters = [parameter for parameter, gradient in pairs if gradient is not None]

    @cached_property
    def plain(self) -> bool:
        """Whether all gradients are plain dense tensors, and all parameters plain tensors: the usual case."""
        strided = {torch.strided}.issuperset(map(_layout, self.gradients))
        return strided and all_plain(self.parameters) and all_plain(self.gradients)

    @cached_property
    def devices(self) -> set[torch.device]:
        """The parameters' devices."""
        return set(map(_device, self.parameters))

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """The gradients' dtypes."""
        return set(map(_dtype, self.gradients))

    def groups(self, by_spread: bool = False) -> "list[GradientGroup]":
        """Group the gradients by device, and if ``by_spread`` also by how they are split between ranks.

        With ``by_spread`` the groups are the same on all ranks that have the same parameters, even if some have no
        gradient here. A group holds plain tensors: a sparse gradient's values, a DTensor's local shard. A float16
        sparse gradient is coalesced first, and the result replaces it: scaled float16 overflows where the values of one
        index are summed, so the check must see the sums.
        """
        everywhere = not by_spread or len(self.parameters) == len(self._every)
        if self.plain and everywhere and len(self.devices) == 1:
            return [GradientGroup(next(iter(self.devices)), WHOLE, self.parameters, self.gradients, plain=True)]
        return _grouped(self._every if by_spread else self.parameters, by_spread)


@dataclass(frozen=True)
class GradientGroup:
    """The gradients on one device, checked in one call, and the parameters they belong to.

    ``spread``: how they are split between ranks, if the gradients are grouped by that. ``plain``: whether each gradient
    is known to be its parameter's ``.grad`` itself.
    """

    device: torch.device
    spread: Spread = WHOLE
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    plain: bool = False

    def as_they_are(self) -> Sequence[Tensor | None]:
        """Return the ``.grad`` of each parameter, or None if it is not a plain dense tensor."""
        if self.plain:
            return self.gradients
        stored = (parameter.grad for parameter in self.parameters)
        return [own if type(own) is Tensor and own.layout is torch.strided else None for own in stored]

    def part(self, places: Sequence[int]) -> "GradientGroup":
        """Return the members at ``places``."""
        if len(places) == len(self.gradients):
            return self
        parameters, gradients = ([members[at] for at in places] for members in (self.parameters, self.gradients))
        return GradientGroup(self.device, self.spread, parameters, gradients, self.plain)


def _grouped(parameters: Iterable[Tensor], by_spread: bool) -> list[GradientGroup]:
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


def reciprocal(scale: Tensor) -> Tensor:
    """1 / scale in float32, computed in float64 and rounded once as torch does; in float32 on mps."""
    return scale.to(widest_float(scale.device)).reciprocal().float()


def multiply_(gradients: Gradients, factor: Tensor) -> None:
    """Multiply the gradients by ``factor`` in place, in one foreach op for each device and dtype."""
    for group in gradients.groups():
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in group.gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for members in by_dtype.values():
            torch._foreach_mul_(members, moved(factor, group.device))
