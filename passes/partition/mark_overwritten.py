"""mark-overwritten: have AOTAutograd's partitioner save what the backward needs of inputs that the forward writes to.

The forward writes at its end, or AOTAutograd after it, so whatever the backward reads of such an input, or computes
from it again, is new. Eager mode saved the old values: a program that reads a buffer, updates it and reads it again has
both.

1. A call of the forward that reads the input's elements, directly or through views, is marked: its result is saved.
2. If the backward itself reads them, because a pass has removed the program's copy of them, all calls read a new copy
   instead, which is saved.
3. Batch norms that update their running statistics do not read them.
4. Marks that a checkpoint of the program has set do not change: eager mode, too, computes again from what is there.
"""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxamp.graph.aliases import memory_readers
from fxamp.graph.nodes import fake_tensors, graph_output
from fxamp.graph.writer import GraphWriter
from fxamp.passes.base import Context, Result, TracedPass
from fxamp.passes.shared.saved_values import PARTITIONERS_MARK, in_backward, view_base
from fxamp.torch_private import written_input

_COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class MarkOverwritten(TracedPass[Context]):
    """Requires a joint graph with values, whose writes are at its end."""

    name = "mark-overwritten"

    def run(self, gm: GraphModule, context: Context) -> Result:
        marked = copied = 0
        for written in _overwritten(gm):
            calls = _readers(written)
            if any(map(in_backward, calls)):
                calls = [_copy(written, calls, GraphWriter(gm.graph, context.mode))]
                copied += 1
            for call in calls:
                if PARTITIONERS_MARK not in call.meta and view_base(call) is None:
                    call.meta[PARTITIONERS_MARK] = CheckpointPolicy.MUST_SAVE
                    marked += 1
        return Result(marked + copied, {"marked": marked, "copied": copied})


def _overwritten(gm: GraphModule) -> list[Node]:
    """Return the inputs that the graph writes to, or that AOTAutograd writes to when the forward has returned."""
    inputs = gm.graph.find_nodes(op="placeholder")
    targets = [copy.args[0] for copy in gm.graph.find_nodes(op="call_function", target=_COPY)]
    later = [written_input(description) for description in graph_output(gm.graph).meta.get("desc") or ()]
    return [node for node in inputs if node in targets or (node.meta.get("desc") or node) in later]


def _readers(written: Node) -> list[Node]:
    """Return the calls that read elements of ``written``, and its views (3)."""
    calls = (node for node in memory_readers(written) if node.op == "call_function" and node.target is not _COPY)
    return [node for node in calls if fake_tensors(node.meta.get("val")) and "batch_norm" not in str(node.target)]


def _copy(written: Node, readers: list[Node], writer: GraphWriter) -> Node:
    """Return a new copy of ``written``, which its ``readers`` read instead."""
    *_, last = writer.graph.find_nodes(op="placeholder")
    with writer.graph.inserting_after(last):
        copy = writer.call(torch.ops.aten.clone.default, written, near=written)
    for reader in readers:
        reader.replace_input_with(written, copy)
    return copy
