"""Check all gradients of one optimizer: flags for those that a compiled graph checked, kernels for the others.

A gradient that was written to after a graph checked it gets both: its flag counts, and its values are read.
"""

import torch
from torch import Tensor

from fxamp.optim.shards import sum_over_ranks_
from fxamp.scaler.contract.gradients import check_group, group_gradients, parameters_with_gradients, refuse_float16
from fxamp.scaler.contract.names import OverflowLedger
from fxamp.scaler.graphs.graph_flags import GraphFlags
from fxamp.torch_devices import moved


@torch.no_grad()
def check_optimizer(
    optimizer: torch.optim.Optimizer,
    found_inf: Tensor,
    inv_scale: Tensor | None,
    graph: GraphFlags | None,
    ledger: OverflowLedger,
    allow_fp16: bool,
    squared_norm: Tensor | None = None,
) -> dict[torch.device, Tensor]:
    """Return, for each device that holds gradients, a copy of ``found_inf`` that is 1.0 if one of them overflowed.

    Args:
        optimizer: parameters whose gradient is None are ignored.
        found_inf: 0-dim float32; the initial value of the flags, usually 0.0.
        inv_scale: 0-dim float32 by which gradients are multiplied in place; None to check only.
        graph: the reports of compiled graphs; None if there are none. If given, gradients are unscaled already and
            are not multiplied.
        ledger: records which parameters overflowed.
        allow_fp16: False raises for float16 gradients.
        squared_norm: 0-dim float32; the squares of all resulting gradients are added to it. Every gradient is then
            read, including those that a graph has checked. Of DTensors they are those of the whole gradients: a
            collective call, which all ranks must make.

    Raises:
        AssertionError: a parameter group holds something that is not a tensor.
        ValueError: a gradient is float16 and ``allow_fp16`` is False.
    """
    parameters = list(parameters_with_gradients(optimizer))
    if not allow_fp16:
        refuse_float16(parameters)
    found: dict[torch.device, Tensor] = {}

    def flag_on(device: torch.device) -> Tensor:
        if device not in found:
            found[device] = moved(found_inf, device, copy=True)
        return found[device]

    if graph is not None:
        inv_scale = None
        if squared_norm is None:
            covered, parameters = graph.split(parameters)
            for device, owners in covered.items():
                flags = graph.read(owners, device)
                _raise_flag(flag_on(device), flags)
                ledger.record(optimizer, owners, flags)
    if squared_norm is not None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group in group_gradients(parameters, by_spread=squared_norm is not None):
        inverse = None if inv_scale is None else moved(inv_scale, group.device)
        square = None if squared_norm is None else torch.zeros_like(squared_norm, device=group.device)
        flags = check_group(group, inverse, flag_on(group.device), square)
        if squared_norm is not None and square is not None:
            squared_norm.add_(moved(sum_over_ranks_(square, group.spread), squared_norm.device))
        if graph is not None:
            flags = torch.maximum(flags, graph.read(group.parameters, group.device))
            _raise_flag(flag_on(group.device), flags)
        ledger.record(optimizer, group.parameters, flags)
    _read_unowned(found, graph)
    return found


def _raise_flag(flag: Tensor, flags: Tensor) -> None:
    """Set the 0-dim ``flag`` to the largest of itself and ``flags``."""
    torch.maximum(flag, flags.max(), out=flag)


def _read_unowned(found: dict[torch.device, Tensor], graph: GraphFlags | None) -> None:
    """Raise the flag of each device on which a graph reported an overflow of a gradient that no parameter owns."""
    for device, flag in found.items():
        unowned = None if graph is None else graph.read_unowned(device)
        if unowned is not None:
            torch.maximum(flag, unowned.squeeze(), out=flag)
