"""Give a captured graph its policy's casts: capture, passes, record."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from fxamp.backend.auto_products import products
from fxamp.backend.policy_choice import Choice
from fxamp.capture import NARROW_OUTPUTS, Captured, capture
from fxamp.capture.autocast_state import ambient_autocast
from fxamp.graph import graph_output, strip_values
from fxamp.nonfinite.watching import Watching
from fxamp.passes.base import CastContext
from fxamp.pipeline import cast_graph as insert_casts
from fxamp.policy import Policy
from fxamp.reports import GraphRecord
from fxamp.reports.dumps import Stages
from fxamp.reports.kept import kept_bytes
from fxamp.reports.list_graph import list_graph
from fxamp.reports.record import record_graph, untouched
from fxamp.reports.warnings import warn_nothing_in_fp8, warn_unmatched
from fxamp.torch_dtypes import NARROW
from fxamp.torch_private import adopt_sources, without_saved_tensors_hooks

log = logging.getLogger(__name__)


def cast_graph(
    gm: GraphModule,
    inputs: Sequence[Any],
    choice: Choice,
    stages: Stages,
    ended: str,
    watching: Watching | None = None,
) -> tuple[GraphModule, GraphRecord, Choice]:
    """Return the graph in mixed precision, or ``gm`` itself without a policy that pays; its record; the final choice.

    ``ended``: the reason for the graph break that ended the graph, if there was one. ``watching`` measures the values
    of the graph, with or without a policy.
    """
    policy = choice.policy
    if policy is None:
        if stages.kept:
            stages.graph("captured", lambda: list_graph(capture(gm, inputs).module, stage="captured"))
        return _measured(gm, inputs, watching), untouched(gm, choice.why, ended), choice
    # Saved-tensor hooks of the program (a checkpoint, an offloader) must not pack what tracing saves.
    with without_saved_tensors_hooks():
        return _cast(gm, inputs, choice, policy, stages, ended, watching)


def _measured(gm: GraphModule, inputs: Sequence[Any], watching: Watching | None) -> GraphModule:
    """Return ``gm``, captured and measured by ``watching``, or as it is."""
    if watching is None:
        return gm
    with without_saved_tensors_hooks():
        captured = capture(gm, inputs)
        watching.measure(captured, list_graph(captured.module), inputs)
    return _handed_on(captured, gm)


def _handed_on(captured: Captured, gm: GraphModule) -> GraphModule:
    """Return the captured graph as compilers take it in place of ``gm``."""
    strip_values(captured.module)
    adopt_sources(gm, captured.module)
    return captured.module


def _cast(
    gm: GraphModule,
    inputs: Sequence[Any],
    choice: Choice,
    policy: Policy,
    stages: Stages,
    ended: str,
    watching: Watching | None,
) -> tuple[GraphModule, GraphRecord, Choice]:
    captured = capture(gm, inputs)
    bytes_before = kept_bytes(captured.module, captured.mode) if stages.kept else None
    stages.graph("captured", lambda: list_graph(captured.module, stage="captured", kept_before=bytes_before))
    # Before a graph break, and in such a model, what follows was or will be traced with the graph's 16-bit dtypes.
    graph_output(captured.module.graph).meta[NARROW_OUTPUTS] = bool(ended) or _has_16_bits(inputs)
    context = CastContext(
        captured.mode,
        policy,
        ambient_autocast(policy.device),
        only_regions=choice.only_regions,
        lstm_kernel=choice.lstm_kernel,
        ended=ended,
    )
    cast = insert_casts(captured, context)
    if choice.if_it_pays:
        choice = choice.settled(products(cast))
    if choice.policy is None:
        return _measured(gm, inputs, watching), untouched(gm, choice.why, ended), choice
    record = record_graph(cast, choice.why)
    kept_after = kept_bytes(captured.module, captured.mode) if stages.kept else None
    stages.graph("cast", lambda: replace(record.listing, kept_before=bytes_before, kept_after=kept_after))
    warn_unmatched(policy.name, record.listing.unmatched, "no op of a compiled graph")
    warn_nothing_in_fp8(policy, record)
    log.info(
        "policy %s (%s): %d ops, %d casts, passes took %.0f ms",
        policy.name,
        choice.why,
        record.ops,
        record.casts,
        1e3 * record.seconds,
    )
    if watching is not None:
        watching.measure(captured, record.listing, inputs)
    return _handed_on(captured, gm), record, choice


def _has_16_bits(inputs: Sequence[Any]) -> bool:
    """Whether the model has 16-bit parameters: its code would fail on wider tensors."""
    return any(isinstance(value, torch.nn.Parameter) and value.dtype in NARROW for value in inputs)
