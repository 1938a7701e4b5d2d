"""Check all gradients of one optimizer: flags for those that a compiled graph checked, kernels for the others.

A gradient that was written to after a graph checked it gets both: its flag counts, and its values are read.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from fxamp.optim.clip import Squares
from fxamp.optim.gradients import GradientGroup, group_gradients
from fxamp.scaler.graphs.graph_flags import GraphFlags
from fxamp.scaler.torch_contract.overflows import OverflowLedger
from fxamp.torch_devices import moved


@torch.no_grad()
def check_gradients(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor | None,
    graph: GraphFlags,
    ledger: OverflowLedger,
    squares: Squares | None = None,
) -> dict[torch.device, Tensor]:
    """Return, for each device that holds gradients, a copy of ``found_inf`` that is 1.0 if one of them overflowed.

    Args:
        optimizer: whose parameters they are.
        parameters: those with a gradient; with ``squares`` all of the optimizer's.
        found_inf: 0-dim float32; the initial value of the flags, usually 0.0.
        inv_scale: 0-dim float32 by which gradients are multiplied in place; None to check only.
        graph: the flags of compiled graphs. If it is attached, gradients are unscaled already and are not multiplied.
        ledger: records which parameters overflowed.
        squares: the squares of all resulting gradients are summed and appended to it. Every gradient is then read,
            including those that a graph has checked.
    """
    groups = group_gradients(parameters, by_spread=squares is not None)
    reports = [graph.reports(group.parameters, group.device, trusted=squares is None) for group in groups]
    unowned = {group.device: graph.unowned(group.device) for group in groups}
    flags: dict[torch.device, Tensor] = {}
    for group, parts in zip(groups, reports, strict=True):
        flag = flags.setdefault(group.device, moved(found_inf, group.device, copy=True))
        inverse = None if inv_scale is None or graph.attached else moved(inv_scale, group.device)
        square = None if squares is None else torch.zeros_like(found_inf, device=group.device)
        for report in parts:
            part = group.part(report.places)
            values = None if report.unchanged else check_group(part, inverse, flag, square)
            overflows = reduce(torch.maximum, [vector for vector in (report.flags, values) if vector is not None])
            if report.flags is not None:
                torch.maximum(flag, overflows.max(), out=flag)
            ledger.record(optimizer, part.parameters, overflows)
        if squares is not None and square is not None:
            squares.append((square, group.spread))
    for device, everybody in unowned.items():
        if everybody is not None:
            torch.maximum(flags[device], everybody, out=flags[device])
    return flags


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
