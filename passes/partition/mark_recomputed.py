"""mark-recomputed: tell AOTAutograd's partitioner which values to recompute in the backward: keep = "recompute".

1. A forward value that such a rule covers is marked, together with the call that computes it. The partitioner then
   saves the inputs of these calls instead.
2. Random ops are never marked: recomputing them would return other numbers. Marks that mark-overwritten or a
   checkpoint of the program has set do not change; results and inputs are not marked.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxamp.graph import is_random, returned, tensor_value
from fxamp.passes.base import CastContext, Result, TracedPass
from fxamp.passes.shared.saved_values import PARTITIONERS_MARK, Memory, call_of, in_backward, keep_decision, owner
from fxamp.policy import KeepRule
from fxamp.policy.model.keep_rule import Keep

#: Key of a marked node's ``meta``: the rule that asks to recompute it.
RECOMPUTED = "fxamp_recomputed"


@dataclass(frozen=True)
class MarkRecomputed(TracedPass[CastContext]):
    """Requires a joint graph with values; ``results`` is the number of the forward's results."""

    results: int
    name = "mark-recomputed"

    def run(self, gm: GraphModule, context: CastContext) -> Result:
        marked = 0
        there = {owner(node) for node in returned(gm.graph)[: self.results] if isinstance(node, Node)}
        for node in _forward_values(gm):
            if node in there or PARTITIONERS_MARK in node.meta:
                continue
            rule = keep_decision(Memory(node, (), ()), context).rule
            if rule is not None and rule.keep is Keep.RECOMPUTE and not is_random(call_of(node)):
                marked += _mark(node, rule)
        return Result(marked, {"marked": marked})


def _forward_values(gm: GraphModule) -> Iterator[Node]:
    """Yield the forward's tensors that are not views; the partitioner handles views by itself."""
    for node in gm.graph.nodes:
        mine = node.op == "call_function" and tensor_value(node) is not None and not in_backward(node)
        if mine and owner(node) is node:
            yield node


def _mark(node: Node, rule: KeepRule) -> int:
    for part in {node, call_of(node)}:
        part.meta[PARTITIONERS_MARK] = CheckpointPolicy.MUST_RECOMPUTE
        part.meta[RECOMPUTED] = rule
    return 1
