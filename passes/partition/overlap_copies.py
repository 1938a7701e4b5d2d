"""overlap-copies: overlap copies to and from host memory with other work, for rules with keep = "host".

1. In a forward, the device waits for each copy to the host where the next one begins, and for the last one at the end
   of the graph. The host waits once, at the end, for all of them; the views that the graph returns are made after that.
2. In a backward, each copy back begins where the previous one is awaited, which is before the first op that reads that
   value. The first copy begins with the graph.
3. So each device has at most one copy under way, and one more value in its memory than without the pass. The op that
   waits takes the source and the target of its copy, so that no compiler frees or overwrites them earlier, or moves a
   reader of the target before the wait.
4. A wait in a backward also takes an operand of the last product before it, so that no compiler begins copies earlier.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils.flop_counter import flop_registry

from fxamp.graph import graph_output, tensor_value
from fxamp.kernels import host_memory as host_memory  # registers the ops
from fxamp.passes.base import Context, Result, TracedPass
from fxamp.passes.shared.saved_values import owner

aten = torch.ops.aten
_SEND = torch.ops.fxamp.send_to_host.default
_TAKE = torch.ops.fxamp.take_from_host.default
_AWAIT = torch.ops.fxamp.await_copies.default


@dataclass(frozen=True)
class OverlapCopies(TracedPass[Context]):
    """Requires a forward or a backward in which each copy is awaited at once, or that the pass has changed already."""

    name = "overlap-copies"

    def relies(self, reader: Node) -> bool:
        return reader.target not in (_SEND, _TAKE, _AWAIT)

    def run(self, gm: GraphModule, context: Context) -> Result:
        sends, takes = (_by_device(gm.graph, target) for target in (_SEND, _TAKE))
        changed = sum(_chain_sends(gm.graph, copies) for copies in sends)
        changed += sum(_chain_takes(gm.graph, copies) for copies in takes)
        return Result(changed, {"overlapped": changed})


def _by_device(graph: Graph, target: OpOverload) -> list[list[Node]]:
    """Return the copies of each device that are awaited at once, in order."""
    groups: dict[object, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=target):
        if node.next.target is _AWAIT and node.next.args[0] == [node]:
            groups.setdefault(node.next.args[1], []).append(node)
    return list(groups.values())


def _chain_sends(graph: Graph, sends: Sequence[Node]) -> int:
    chained = any(send.args[1] for send in sends)
    ends_the_graph = len(sends) == 1 and sends[0].next.next.next is graph_output(graph)
    if chained or ends_the_graph:
        return 0
    for send, later in pairwise(sends):
        graph.erase_node(send.next)
        later.args = (later.args[0], [send, send.args[0]])
    end = sends[-1].next
    end.args = (list(sends), *end.args[1:])
    output = graph_output(graph)
    output.prepend(end)
    for send in sends:
        for view in [user for user in send.users if user.target is aten.unsqueeze.default]:
            output.prepend(view)
    return len(sends)


def _chain_takes(graph: Graph, takes: Sequence[Node]) -> int:
    if any(take.args[2] for take in takes) or (len(takes) == 1 and takes[0].prev.op == "placeholder"):
        return 0
    waits = [take.next for take in takes]
    graph.find_nodes(op="placeholder")[-1].append(takes[0])
    for take, wait, later in zip(takes, waits, takes[1:], strict=False):
        wait.append(later)
        later.args = (*later.args[:2], [take])
    for take, wait in zip(takes, waits, strict=True):
        operand = _operand_before(wait)
        if operand is not None:
            wait.args = (*wait.args[:2], [take.args[0], operand])
    return len(takes)


def _operand_before(wait: Node) -> Node | None:
    """Return an operand, computed by the graph, of the last product before ``wait``: by then it is written to memory.

    The product's own result does not work: with one more reader, Inductor would not fuse it with the sum that
    reads it.
    """
    node = wait.prev
    while node.op not in ("placeholder", "root"):
        if getattr(node.target, "overloadpacket", None) in flop_registry:
            for operand in node.all_input_nodes:
                source = owner(operand)
                if source.op == "call_function" and source.target is not _TAKE and tensor_value(operand) is not None:
                    return operand
        node = node.prev
    return None
