"""mark-overwritten: have AOTAutograd's partitioner save what the forward computes from inputs that it writes to.

1. A call of the forward that reads the elements of such an input, directly or through views, is marked: repeated in the
   backward, it would read what the forward wrote in the end. Without the mark, torch's partitioner adds an update to a
   buffer once more for the gradients.
2. Batch norms that update their running statistics do not read them.
3. Marks that a checkpoint of the program has set do not change: eager mode, too, computes again from what is there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxamp.graph.aliases import is_view, memory_readers
from fxamp.graph.nodes import fake_tensors
from fxamp.passes.base import Context, Result, TracedPass
from fxamp.passes.shared.saved_values import in_backward, view_base

#: The key that torch's partitioners read.
_MARK = "recompute"


@dataclass(frozen=True)
class MarkOverwritten(TracedPass[Context]):
    """Requires a joint graph with values; changes no call."""

    name = "mark-overwritten"

    def run(self, gm: GraphModule, context: Context) -> Result:
        marked = 0
        for call in _reads(gm):
            if _MARK not in call.meta:
                call.meta[_MARK] = CheckpointPolicy.MUST_SAVE
                marked += 1
        return Result(marked, {"marked": marked})


def _reads(gm: GraphModule) -> Iterator[Node]:
    """Yield the forward's calls that compute tensors from the elements of an input that the graph writes to (1, 2)."""
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    for written in dict.fromkeys(copy.args[0] for copy in copies):
        for reader in memory_readers(written):
            if reader.op != "call_function" or in_backward(reader) or "batch_norm" in str(reader.target):
                continue
            if fake_tensors(reader.meta.get("val")) and not is_view(reader) and view_base(reader) is None:
                yield reader
