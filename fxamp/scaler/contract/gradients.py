"""Find an optimizer's gradients, DTensors and sparse ones too, and check them: one call per device.

The kernels sort the gradients by dtype.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fxamp.optim.shards import WHOLE, Spread, all_plain, local, settle_gradient, spread_of


@dataclass(frozen=True)
class GradientGroup:
    """The gradients on one device, checked in one call, and the parameters they belong to.

    ``spread``: how they are split between ranks, where the groups are made so that their squares can be summed.
    """

    device: torch.device
    spread: Spread = WHOLE
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


def parameters_with_gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the optimizer's parameters that have a gradient.

    Raises:
        AssertionError: a parameter group holds something that is not a tensor.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not isinstance(parameter, Tensor):
                raise AssertionError(f"expected param to be torch.Tensor, got {type(parameter).__name__}")
            if parameter.grad is not None:
                yield parameter


def stored_gradient(parameter: Tensor) -> Tensor:
    """Return the plain tensor that stores the parameter's gradient: a sparse one's values, a DTensor's local shard.

    A float16 sparse gradient is coalesced first, and the result replaces it: summing the values of one index is where
    scaled float16 overflows, so the check must see the sums.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        if gradient.dtype == torch.float16:
            gradient = parameter.grad = gradient.coalesce()
        return gradient._values()
    part: Tensor = local(gradient)
    return part


def refuse_float16(parameters: Iterable[Tensor]) -> None:
    """Raise ValueError if a gradient is float16: unscaling in float16 would underflow again."""
    gradients = map(attrgetter("grad"), parameters)
    if any(gradient is not None and gradient.dtype == torch.float16 for gradient in gradients):
        raise ValueError("Attempting to unscale FP16 gradients.")


def group_gradients(parameters: Iterable[Tensor], by_spread: bool = False) -> list[GradientGroup]:
    """Group the parameters' gradients by device, and ``by_spread``: by how they are split between ranks.

    The groups ``by_spread`` are the same on all ranks if ``parameters`` are; parameters may have no gradient then.
    """
    parameters = list(parameters)
    gradients = list(map(attrgetter("grad"), parameters))
    devices = set(map(attrgetter("device"), parameters))
    if len(devices) == 1 and _stored_as_they_are(parameters, gradients):
        return [GradientGroup(devices.pop(), WHOLE, parameters, gradients)]
    groups: dict[tuple[torch.device, Spread], GradientGroup] = {}
    for parameter in parameters:
        if by_spread:
            settle_gradient(parameter)
        spread = spread_of(parameter) if by_spread else WHOLE
        gradient = None if parameter.grad is None else stored_gradient(parameter)
        device = parameter.device if gradient is None else gradient.device
        group = groups.setdefault((device, spread), GradientGroup(device, spread))
        if gradient is not None:
            group.parameters.append(parameter)
            group.gradients.append(gradient)
    return list(groups.values())


def _stored_as_they_are(parameters: Sequence[Tensor], gradients: Sequence[Any]) -> bool:
    """Whether each parameter has a gradient, and all are plain dense tensors: the usual case, found out fast."""
    if not all_plain(parameters) or not all_plain(gradients):
        return False
    return {torch.strided}.issuperset(map(attrgetter("layout"), gradients))


def check_group(
    group: GradientGroup, inv_scale: Tensor | None, found_inf: Tensor, squared_norm: Tensor | None = None
) -> Tensor:
    """Check a group for inf and NaN, and multiply it by ``inv_scale`` in place if that is given.

    Args:
        group: gradients of one device.
        inv_scale: 0-dim float32 on the group's device; None leaves the gradients unchanged.
        found_inf: 0-dim float32 on the group's device; set to 1.0 if any value is inf or NaN.
        squared_norm: 0-dim float32 on the group's device; set to the sum of squares of the resulting gradients.

    Returns:
        int32 ``[len(group.gradients)]`` on the group's device: 1 for each gradient that holds an inf or NaN.
    """
    from fxamp.kernels import check_, check_unscale_

    flags = torch.empty(len(group.gradients), dtype=torch.int32, device=group.device)
    if not group.gradients:
        return flags
    if inv_scale is None:
        check_(group.gradients, found_inf, flags, squared_norm)
    else:
        check_unscale_(group.gradients, inv_scale, found_inf, flags, squared_norm)
    return flags
