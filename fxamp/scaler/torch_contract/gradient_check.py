"""Check all gradients of one optimizer: flags for those that a compiled graph checked, kernels for the others.

A gradient that was written to after a graph checked it gets both: its flag counts, and its values are read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fxamp.optim.clip import Squares
from fxamp.optim.gradients import GradientGroup
from fxamp.scaler.graphs.graph_flags import GraphFlags
from fxamp.scaler.torch_contract.overflows import OverflowLedger
from fxamp.torch_devices import known, moved


def check_gradients(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[GradientGroup],
    inv_scale: Tensor | None,
    graph: GraphFlags,
    ledger: OverflowLedger,
    squares: Squares | None,
) -> dict[torch.device, Tensor]:
    """Return a flag for each device that holds gradients: 0-dim float32, 1.0 if one of them overflowed.

    Args:
        optimizer: the owner of the gradients.
        groups: groups of the gradients; with ``squares`` also empty ones, which other ranks may have filled.
        inv_scale: 0-dim float32 by which gradients are multiplied in place; None to check only.
        graph: the flags of compiled graphs. If it is attached, gradients are unscaled already and are not multiplied.
        ledger: records which parameters overflowed.
        squares: the squares of all resulting gradients are summed and appended to it. Every gradient is then read,
            including those that a graph has checked.
    """
    ledger.names.meet(optimizer)
    flags: dict[torch.device, Tensor] = {}
    for group in groups:
        if group.device not in flags:
            flags[group.device] = torch.zeros((), dtype=torch.float32, device=group.device)
        flag = flags[group.device]
        inverse = None if inv_scale is None or graph.attached else moved(inv_scale, group.device)
        square = None if squares is None else torch.zeros((), dtype=torch.float32, device=group.device)
        for report in graph.reports(group, trusted=squares is None):
            overflows = report.flags
            if report.unread is not None:
                values = check_group(group.part(report.unread), inverse, flag, square)
                overflows = values if overflows is None else torch.maximum(overflows, values)
            assert overflows is not None
            if known(overflows) is False:
                continue
            flag.masked_fill_(overflows.any(), 1.0)
            ledger.record(report.parameters, overflows)
        if squares is not None and square is not None:
            squares.append((square, group.spread))
    return flags


@torch.no_grad()
def check_group(
    group: GradientGroup, inv_scale: Tensor | None, found_inf: Tensor, squared_norm: Tensor | None
) -> Tensor:
    """Check a group, and multiply it by ``inv_scale`` if that is given; return the flags, one for each gradient.

    Arguments and flags are those of :func:`fxamp.kernels.check_unscale_`, on the group's device.
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
