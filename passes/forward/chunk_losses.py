"""chunk-losses: compute the logits of a loss a chunk of rows at a time, where a rule with ``chunks`` says so.

1. A cross entropy and the linear layer whose results only it reads become one call of
   :mod:`fxamp.kernels.linear_cross_entropy`, which AOTAutograd traces through.
2. Views and slices of the logits' rows become those of the layer's inputs. A ``logsumexp`` of the logits becomes
   another result of the call.
3. The products keep the dtype that the casts gave the layer, or run in fp8 where a rule says so. The call reads the
   weight before fxamp's cast, so that the weight's gradient is rounded once.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxamp.graph import INSERTED, GraphWriter, all_graphs, all_nodes, argument, dtype_of, tensor_value
from fxamp.graph.scope import Scope
from fxamp.kernels.linear_cross_entropy import CHUNKED, WITH_LOG_SUMS
from fxamp.kernels.loss_chunks import Gradients
from fxamp.passes.base import CastContext, Pass, Result, broken_by
from fxamp.passes.forward.scale_products import asked_in_fp8, why_16_bits
from fxamp.passes.shared.cast_writer import before_cast
from fxamp.passes.shared.decision import Decision, decide, decision
from fxamp.passes.shared.linear_losses import SIZED, LinearLoss, linear_loss
from fxamp.policy import CastRule
from fxamp.policy.model.site import LOSS

aten = torch.ops.aten


@dataclass(frozen=True)
class ChunkLosses(Pass[CastContext]):
    """Requires inserted casts; ensures that every loss with a chunk rule is chunked, or cannot be."""

    name = "chunk-losses"

    def run(self, gm: GraphModule, context: CastContext) -> Result:
        if not context.policy.has_rules_for(LOSS):
            return Result(0)
        with context.computing():
            cut = sum(_cut(graph, context) for graph in all_graphs(gm))
        return Result(cut, {"chunked": cut})

    def ensures(self, gm: GraphModule, context: CastContext) -> str | None:
        return broken_by("losses left whole", (n for n in all_nodes(gm) if _chunkable(n, context) is not None))


def _chunkable(node: Node, context: CastContext) -> LinearLoss | None:
    match = linear_loss(node, context)
    return match if isinstance(match, LinearLoss) else None


def _cut(gm: GraphModule, context: CastContext) -> int:
    matches = [match for node in gm.graph.nodes if (match := _chunkable(node, context)) is not None]
    for match in matches:
        _replace(match, GraphWriter(gm.graph, context.mode), context)
    return len(matches)


def _replace(match: LinearLoss, writer: GraphWriter, context: CastContext) -> None:
    loss, linear = match.loss, match.linear
    why, choice = f"for {loss.name}: a chunk of its logits at a time", _decision(match, context)
    for node in match.moved:
        match.place.prepend(node)
    with loss.graph.inserting_before(match.place):
        rows = _rows(match, writer, why)
        target = _target(match, writer, why)
        form = [argument(loss, name) for name in ("weight", "reduction", "ignore_index", "label_smoothing")]
        weight, bias = (before_cast(argument(linear, name)) for name in ("weight", "bias"))
        early = str(match.rule.gradients or Gradients.IN_FORWARD)
        gradients = str(Gradients.IN_BACKWARD) if match.log_sums else early
        call = writer.call(
            WITH_LOG_SUMS if match.log_sums else CHUNKED,
            rows, weight, bias, target, *form, dtype_of(linear), match.chunks, gradients,
            *([str(choice.rule.recipe)] if isinstance(choice.rule, CastRule) else []),
            near=loss, name="linear_cross_entropy",
        )  # fmt: skip
        decide(call, choice)
        results = [writer.item(call, index) for index in (0, 1)] if match.log_sums else [call]
        for node, result in ((loss, results[0]), *((log_sum, results[-1]) for log_sum in match.log_sums)):
            node.replace_all_uses_with(_as(node, result, writer, why))
    _erase(match)


def _as(node: Node, result: Node, writer: GraphWriter, why: str) -> Node:
    """Write ``result`` in the shape and the dtype of ``node``."""
    before, value = tensor_value(node), tensor_value(result)
    assert before is not None and value is not None
    if value.shape != before.shape:
        result = writer.call(aten.reshape.default, result, list(before.shape), near=node, why=why)
    if before.dtype is not torch.float32:
        result = writer.call(aten.to.dtype, result, before.dtype, near=node, why=why)
    return result


def _decision(match: LinearLoss, context: CastContext) -> Decision:
    """Return the decision for the chunked loss: by the fp8 rule if its products run in fp8, else by the chunk rule."""
    in_fp8 = asked_in_fp8(match.linear)
    why = "" if in_fp8 is None else why_16_bits(match.linear, in_fp8, context, Scope(match.linear.graph))
    reason = f"{match.chunks} chunks; {match.rule.why}"
    if in_fp8 is not None and not why:
        return replace(in_fp8, reason=f"{reason} {in_fp8.reason}")
    choice = decision(match.loss) or Decision(None, None, "")
    return replace(choice, rule=match.rule, reason=reason, overruled="", lost=(), not_fp8=why)


def _rows(match: LinearLoss, writer: GraphWriter, why: str) -> Node:
    """Write the layer's inputs as ``[N, K]``, in the order of the loss's rows."""
    rows: Node = argument(match.linear, "input")
    hidden = tensor_value(rows)
    assert hidden is not None
    for op in match.row_ops:
        args: list[Any] = [rows, *op.args[1:]]
        target: Any = op.target
        if target in SIZED:
            # A copy of the logits may have made a view possible.
            args[1], target = [*args[1][:-1], hidden.shape[-1]], aten.reshape.default
        rows = writer.call(target, *args, near=match.loss, why=why, **op.kwargs)  # type: ignore[arg-type]
    value = tensor_value(rows)
    if value is not None and value.dim() != 2:
        rows = writer.call(aten.reshape.default, rows, [-1, hidden.shape[-1]], near=match.loss, why=why)
    return rows


def _target(match: LinearLoss, writer: GraphWriter, why: str) -> Node:
    """Write the classes as ``[N]``, or the probabilities as ``[N, C]``."""
    target: Node = argument(match.loss, "target")
    if not match.classes_second:
        return target
    value, sizes = tensor_value(target), [-1]
    if value is not None and value.dim() == 3:
        target = writer.call(aten.transpose.int, target, 1, 2, near=match.loss, why=why)
        sizes = [-1, value.shape[1]]
    return writer.call(aten.reshape.default, target, sizes, near=match.loss, why=why)


def _erase(match: LinearLoss) -> None:
    """Erase the loss, its log-sums, the layer, the ops between them, and the casts that only they read."""
    linear, graph = match.linear, match.loss.graph
    operands = linear.all_input_nodes
    for node in (*match.log_sums, match.loss):
        while node is not linear and not node.users:
            source: Any = node.args[0]
            graph.erase_node(node)
            node = source
    graph.erase_node(linear)
    for operand in operands:
        if INSERTED in operand.meta and not operand.users:
            graph.erase_node(operand)
