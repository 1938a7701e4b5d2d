"""measure-gradients: return the largest magnitude of each floating value of a backward graph as one more output.

measure-results does the same for a forward. This pass works on AOTAutograd's graph after its decompositions, with the
ops that Inductor lowers, and after all other passes, so that scaled gradients are measured scaled.

The pass does not measure saved tensors and recomputed values again: the forward has measured them, except those that a
policy saves in 16 bits. The products with the loss scale and its inverse are not measured, but what they multiply is.
If a Function's backward computes something from saved tensors alone, AOTAutograd may move that to the forward, and it
is an input here. If the backward of one op is decomposed into several ops, only the results that other ops read are
measured.
"""

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter, graph_output
from fxamp.passes.backward.scale_backward import tangents
from fxamp.passes.base import Context, Result, TracedPass
from fxamp.passes.shared.kept_packing import PACKED
from fxamp.passes.shared.magnitude_writer import MagnitudeWriter, in_shape_read, place_of
from fxamp.passes.shared.magnitudes import (
    MEASURED,
    OP,
    is_known,
    is_measured,
    is_narrowing,
    measured_results,
    passes_on,
)
from fxamp.passes.shared.saved_values import in_backward


@dataclass(frozen=True)
class MeasureGradients(TracedPass[Context]):
    """Requires values on all nodes; ensures that the last output holds a number for each name in ``meta[MEASURED]``."""

    name = "measure-gradients"

    def run(self, gm: GraphModule, context: Context) -> Result:
        output = graph_output(gm.graph)
        if MEASURED in output.meta:
            return Result(0)
        writer = MagnitudeWriter(GraphWriter(gm.graph, context.mode), traced=True)
        entering, returned = set(tangents(gm)), measured_results(output)
        names: list[str] = []
        parts: list[Node] = []
        known: set[Node] = set()
        for node in list(gm.graph.nodes):
            own = in_backward(node) or _of_function(node)
            placed = own and _leaves_op(node)
            if node.op == "placeholder":
                placed = node in entering or PACKED in node.meta or _of_function(node)
            inherits = is_known(node, known)
            if inherits:
                known.add(node)
            overflows = own and not inherits and is_narrowing(node)
            if overflows or (placed and (node in returned or is_measured(node, known))):
                known.add(node)
                source = node if node.op == "placeholder" else in_shape_read(node)
                with gm.graph.inserting_before(place_of(source)):
                    names.append(node.name)
                    parts.append(writer.magnitude(source))
        writer.add_output(gm, names, parts)
        return Result(len(names), {"measured": len(names)})

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        return None if MEASURED in graph_output(gm.graph).meta else "nothing says what is measured"


def _of_function(node: Node) -> bool:
    """Whether ``node`` comes from the backward of a Function: AOTAutograd tags no such node."""
    return "partitioner_tag" not in node.meta and _op(node) is not None


def _leaves_op(node: Node) -> bool:
    """Whether the backward of another op reads the result of ``node``, or the graph returns it."""
    if _op(node) is None:
        return True
    return any(_op(user) != _op(node) or (passes_on(user) and _leaves_op(user)) for user in node.users)


def _op(node: Node) -> object:
    """Return the forward's op to which ``node`` belongs; None if it belongs to none, such as a sum of gradients."""
    return node.meta.get("custom", {}).get(OP)
