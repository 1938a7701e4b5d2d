"""Process gradients on several devices: one part per device, with the results combined on one device."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fxamp.kernels.dispatch import perform
from fxamp.kernels.gradient_request import UnscaleRequest
from fxamp.torch_devices import moved


def perform_everywhere(work: UnscaleRequest, home: torch.device, keep: bool) -> None:
    """Do the work of a :class:`~fxamp.kernels.gradient_request.UnscaleRequest` whose sources may be on any devices.

    Args:
        work: what to do; its sources may be on several devices; each target is on its source's device.
        home: the device of ``inv_scale`` and of all results.
        keep: whether tables of addresses may be kept for the next call.
    """
    devices = [source.device for source in work.sources]
    if set(devices) <= {home}:
        perform(work, keep)
        return
    for device in dict.fromkeys(devices):
        positions = [position for position, place in enumerate(devices) if place == device]
        _perform_share(work, positions, device, home, keep)


def _perform_share(
    work: UnscaleRequest, positions: list[int], device: torch.device, home: torch.device, keep: bool
) -> None:
    sources, targets = _chosen(work.sources, positions), None
    if work.targets is not None:
        targets = sources if work.targets is work.sources else _chosen(work.targets, positions)
    share = replace(
        work,
        sources=sources,
        targets=targets,
        inv_scale=None if work.inv_scale is None else moved(work.inv_scale, device),
        found_inf=None if work.found_inf is None else torch.zeros_like(work.found_inf, device=device),
        flags=None if work.flags is None else torch.zeros(len(positions), dtype=torch.int32, device=device),
        squared_norm=None if work.squared_norm is None else torch.zeros_like(work.squared_norm, device=device),
    )
    perform(share, keep)
    if work.found_inf is not None and share.found_inf is not None:
        work.found_inf.masked_fill_(moved(share.found_inf, home) != 0, 1.0)
    if work.flags is not None and share.flags is not None:
        torch._foreach_copy_(_chosen(work.flags.unbind(), positions), list(moved(share.flags, home).unbind()))
    if work.squared_norm is not None and share.squared_norm is not None:
        work.squared_norm.add_(moved(share.squared_norm, home))


def _chosen(tensors: Sequence[Tensor], positions: list[int]) -> list[Tensor]:
    return [tensors[position] for position in positions]
