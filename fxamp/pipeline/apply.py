"""Give a captured graph a policy's casts."""

import torch

from fxamp.capture import Captured
from fxamp.passes.base import CastContext
from fxamp.passes.sequences import FORWARD
from fxamp.pipeline.run import run_passes
from fxamp.policy import Policy
from fxamp.reports.record import GraphRecord, record_graph


def apply_policy(
    captured: Captured,
    policy: Policy,
    ambient: torch.dtype | None,
    why: str,
    every_device: bool = False,
    ended: str = "",
    only_regions: torch.dtype | None = None,
    lstm_kernel: bool = True,
) -> GraphRecord:
    """Run the passes over ``captured``, in place.

    ``policy`` is resolved. ``ambient`` is the dtype of the autocast that the program was captured under, if any.
    ``ended`` is the reason for the graph break that ended the graph, if there was one. ``every_device``,
    ``only_regions`` and ``lstm_kernel`` are as in :class:`CastContext`.
    """
    context = CastContext(captured.mode, policy, ambient, every_device, only_regions, lstm_kernel, ended)
    passes = run_passes(captured, context, FORWARD)
    return record_graph(captured.module, policy, why, passes, ended=ended)
