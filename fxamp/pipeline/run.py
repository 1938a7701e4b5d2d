"""The loop that runs passes; their order is in :mod:`fxamp.passes.sequences`."""

import logging
import operator
import time
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule, Node

from fxamp.capture import Captured
from fxamp.errors import FxampError, PassError
from fxamp.graph import all_graphs, all_nodes, describe_source, mode_of, verify
from fxamp.passes.base import CastContext, ContextT, Pass, Result, TracedPass
from fxamp.passes.sequences import FORWARD
from fxamp.pipeline.layouts import TracedLayouts
from fxamp.policy import Policy
from fxamp.reports.record import CastGraph, PassRecord
from fxamp.torch_private import dropped_sizes, without_saved_tensors_hooks

log = logging.getLogger(__name__)


def run_passes(captured: Captured, context: ContextT, *passes: Pass[ContextT]) -> list[PassRecord]:
    """Rewrite ``captured.module`` in place with ``passes`` in order; return what each did and its time.

    After each pass that changed a call the graph is verified; the pass's ``ensures`` is checked after each one. A graph
    of AOTAutograd's keeps the strides that it was traced with. The code of the module is generated once, in the end.
    Raises PassError, with the pass, the node and the user's source line, if a pass fails or breaks its contract. Errors
    meant for the user (BannedOpError) are not wrapped.
    """
    records: list[PassRecord] = []
    calls = captured_calls = _calls(captured.module)
    for step in passes:
        start = time.perf_counter()
        with dropped_sizes(captured.mode.shape_env), without_saved_tensors_hooks():
            result, calls = _run(step, captured.module, context, [record.name for record in records], calls)
        seconds = time.perf_counter() - start
        records.append(PassRecord(step.name, seconds, result.modified, result.counts))
        log.debug("%s: %d changes in %.1f ms", step.name, result.modified, 1e3 * seconds)
    if _differ(captured_calls, calls):
        for graph in all_graphs(captured.module):
            graph.recompile()
    return records


def cast_graph(captured: Captured, context: CastContext) -> CastGraph:
    """Insert the casts of the policy of ``context`` into ``captured``, in place. Errors as above."""
    return CastGraph(captured, context, tuple(run_passes(captured, context, *FORWARD)))


def run_traced(gm: GraphModule, policy: Policy, *passes: Pass[CastContext]) -> None:
    """Rewrite ``gm``, a graph of AOTAutograd's, in place; one without tensors stays as it is. Errors as above."""
    mode = mode_of(gm)
    if mode is not None:
        run_passes(Captured(gm, mode), CastContext(mode, policy), *passes)


def _run(
    step: Pass[ContextT], gm: GraphModule, context: ContextT, before: list[str], calls: list[object]
) -> tuple[Result, list[object]]:
    """Run one pass by its contract; return its result, and the calls after it. ``calls``: those before."""
    missing = step.requires(gm, context)
    if missing is not None:
        raise PassError(_message(step, f"cannot run: {missing}", None, before))
    try:
        result = _traced(step, gm, context) if isinstance(step, TracedPass) else step.run(gm, context)
        after = _calls(gm)
        if _differ(calls, after):
            verify(gm)
    except FxampError:
        raise
    except Exception as error:
        raise PassError(_message(step, f"{type(error).__name__}: {error}", _node_at(error), before)) from error
    broken = step.ensures(gm, context)
    if broken is not None:
        raise PassError(_message(step, f"broke its promise: {broken}", None, before))
    return result, after


def _traced(step: TracedPass[ContextT], gm: GraphModule, context: ContextT) -> Result:
    """Run a pass over AOTAutograd's graph, and restore the strides that its ops rely on."""
    layouts = TracedLayouts(gm)
    result = step.run(gm, context)
    copies = layouts.restore(gm, step, context)
    return replace(result, counts={**result.counts, "restored": copies}) if copies else result


def _calls(gm: GraphModule) -> list[object]:
    """Return the calls of ``gm`` and its bodies. torch.fx replaces arguments and never changes them in place."""
    return [part for node in all_nodes(gm) for part in (node, node.target, node.args, node.kwargs)]


def _differ(before: list[object], after: list[object]) -> bool:
    return len(before) != len(after) or any(map(operator.is_not, before, after))


def _node_at(error: BaseException) -> Node | None:
    """Return the innermost fx node that the failing code was working on, from its frames' variable ``node``."""
    innermost: Node | None = None
    trace = error.__traceback__
    while trace is not None:
        value = trace.tb_frame.f_locals.get("node")
        innermost = value if isinstance(value, Node) else innermost
        trace = trace.tb_next
    return innermost


def _message(step: Pass[Any], what: str, node: Node | None, before: list[str]) -> str:
    lines = [f"pass {step!r} ({step.name}) {what}"]
    if node is not None:
        lines.append(f"  node {node.name} = {node.target}{node.args}")
        lines.append(f"  at {describe_source(node)}")
    lines.append(f"  passes that ran before: {', '.join(before) or 'none'}")
    return "\n".join(lines)
