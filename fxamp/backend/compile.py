"""The entry point that ``torch.compile(model, backend="fxamp")`` calls with each graph that Dynamo captured."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from fxamp.backend.backward_rules import backward_rules
from fxamp.backend.choose import Choice, choose_policy, device_of
from fxamp.backend.guards import guard_policy
from fxamp.backend.kept_rules import kept_rules
from fxamp.backend.lowering import Compilation, lower_graph
from fxamp.backend.options import parse_options
from fxamp.backend.products import products
from fxamp.backend.unscaled import warn_unscaled
from fxamp.backend.unused_results import may_be_unused
from fxamp.capture import NARROW_OUTPUTS, Captured, capture
from fxamp.capture.autocast_state import ambient_autocast
from fxamp.errors import BannedOpError, CaptureError, MachineError, OptionError, PolicyError
from fxamp.graph import graph_output
from fxamp.observe import CompileStage, observed
from fxamp.passes.base import CastContext
from fxamp.passes.sequences import FORWARD
from fxamp.pipeline import run_passes
from fxamp.policy import Policy
from fxamp.reports import GraphRecord
from fxamp.reports.breaks import why_ended
from fxamp.reports.dumps import Stages
from fxamp.reports.kept import kept_bytes
from fxamp.reports.list_graph import list_graph
from fxamp.reports.record import record_graph, untouched
from fxamp.reports.registry import forget_autocast, remember
from fxamp.reports.warnings import warn_nothing_in_fp8, warn_unmatched
from fxamp.scaler.graphs.scaled_backward import Scaling
from fxamp.torch_dtypes import NARROW
from fxamp.torch_private import adopt_sources, raised_through_dynamo, without_saved_tensors_hooks

log = logging.getLogger(__name__)


def fxamp(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile ``gm`` in mixed precision; ``example_inputs`` are its inputs, real or fake, in placeholder order.

    ``options`` and ``mode`` are torch.compile's. The returned callable takes the same inputs and returns the outputs as
    a tuple, in the dtypes that Dynamo captured. Raises OptionError or PolicyError before it traces anything. Dynamo
    passes an error of the user's on unchanged.
    """
    try:
        return _compile(gm, example_inputs, options, mode)
    except (OptionError, PolicyError, BannedOpError, CaptureError, MachineError) as error:
        raise raised_through_dynamo(error, fxamp, inspect.currentframe()) from None


fxamp.reset = forget_autocast  # type: ignore[attr-defined]  # torch._dynamo.reset calls it


def _compile(
    gm: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None, mode: str | None
) -> Callable[..., Any]:
    parsed = parse_options(options, mode)
    choice = choose_policy(parsed, example_inputs, gm)
    guard_policy(parsed, choice, device_of(example_inputs))
    rules, kept = backward_rules(choice.policy, parsed), kept_rules(choice.policy, parsed)
    warn_unscaled(choice.policy, parsed, example_inputs)
    scaling = None
    if parsed.scaler is not None and choice.policy is not None:
        scaling = Scaling(parsed.scaler, choice.policy)
        scaling.begin()
    stages = Stages(parsed.dump)
    ended = why_ended(gm)
    module, record = gm, untouched(choice.why, ended)
    if choice.policy is not None:
        # Saved-tensor hooks of the program (a checkpoint, an offloader) must not pack what tracing saves.
        with without_saved_tensors_hooks():
            module, record, choice = _rewrite(gm, example_inputs, choice, stages, ended)
    elif stages.kept:
        stages.graph("captured", lambda: list_graph(capture(gm, example_inputs).module, stage="captured"))
    with observed(CompileStage("lowering")):
        unused = choice.policy is not None and (scaling is not None or not ended) and may_be_unused(gm)
        compiled = lower_graph(
            module, example_inputs, parsed, Compilation(choice.policy, scaling, stages, rules, kept, unused)
        )
    if kept is not None:
        kept.log_unmatched()
        record = replace(record, kept=tuple(kept.values))
    compiled = compiled if scaling is None else scaling.watching(compiled)
    return remember(record, choice.under_autocast).noting(compiled, example_inputs)


def _rewrite(
    gm: GraphModule, inputs: Sequence[Any], choice: Choice, stages: Stages, ended: str
) -> tuple[GraphModule, GraphRecord, Choice]:
    """Return the graph in mixed precision, or ``gm`` itself if that does not pay; its record; the final choice."""
    policy = choice.policy
    assert policy is not None
    ambient = ambient_autocast(policy.device)
    with observed(CompileStage("capture")):
        captured = capture(gm, inputs)
    kept = kept_bytes(captured.module, captured.mode) if stages.kept else None
    stages.graph("captured", lambda: list_graph(captured.module, stage="captured", kept_before=kept))
    graph_output(captured.module.graph).meta[NARROW_OUTPUTS] = _goes_on_in_16_bits(gm, inputs)
    record = apply_policy(captured, policy, ambient, choice.why, ended=ended, only_regions=choice.only_regions)
    if choice.if_it_pays:
        choice = choice.settled(products(captured, CastContext(captured.mode, policy, ambient)), gm)
        record = replace(record, listing=replace(record.listing, chosen=choice.why))
    if choice.policy is None:
        return gm, untouched(choice.why, ended), choice
    kept_after = kept_bytes(captured.module, captured.mode) if stages.kept else None
    stages.graph("cast", lambda: replace(record.listing, kept_before=kept, kept_after=kept_after))
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
    strip_values(captured.module)
    adopt_sources(gm, captured.module)
    return captured.module, record, choice


def _goes_on_in_16_bits(gm: GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether code after the graph was or will be traced with the 16-bit dtypes that the graph was captured with.

    True before a graph break, and for a model with 16-bit parameters, whose code would fail on wider tensors.
    """
    parameters = (value for value in inputs if isinstance(value, torch.nn.Parameter))
    return bool(why_ended(gm)) or any(value.dtype in NARROW for value in parameters)


def apply_policy(
    captured: Captured,
    policy: Policy,
    ambient: torch.dtype | None,
    why: str,
    every_device: bool = False,
    ended: str = "",
    only_regions: torch.dtype | None = None,
) -> GraphRecord:
    """Run the passes over ``captured``, in place.

    ``policy`` is resolved. ``ambient`` is the dtype of the autocast that the program was captured under, if any.
    ``ended`` is the reason for the graph break that ended the graph, if there was one. ``every_device`` and
    ``only_regions`` are as in :class:`CastContext`.
    """
    context = CastContext(captured.mode, policy, ambient, every_device, only_regions)
    with observed(CompileStage("passes")):
        passes = run_passes(captured, context, FORWARD)
        return record_graph(captured.module, policy, why, passes, ended=ended)


def strip_values(gm: GraphModule) -> None:
    """Remove all values: they belong to fxamp's fake mode, and AOTAutograd rejects a graph with two fake modes."""
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            for key in ("val", "tensor_meta", "example_value"):
                node.meta.pop(key, None)
