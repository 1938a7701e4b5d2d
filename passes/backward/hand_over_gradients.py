"""hand-over-gradients: hand over gradients of parameters as soon as they are computed, instead of returning them.

1. The outputs at ``places`` become None. ``output.meta[HANDED_OVER]`` holds, for each, the name of its parameter if the
   graph reads that, else None.
2. Gradients are handed over in groups of at least ``group`` bytes, in the order in which they are ready; the last group
   may be smaller.
3. A gradient is ready when it has been computed and the graph has read the parameter, directly or through views, for
   the last time, because the receiver may change the parameter. The op declares that it writes to the parameters that
   the graph reads, so that no compiler moves a read past it.
4. Gradients that are small compared with a group are handed over at the end. Handing them over earlier would save
   nothing, and values computed from their parameters, such as those of norms, would have to be stored first.
5. An empty call precedes a group with parameters that the graph reads. Inductor delays reads until after the call that
   they must precede; with the empty call, they end up between the two calls.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter, graph_output, returned, tensor_value
from fxamp.graph.aliases import memory_readers
from fxamp.kernels import hand_over as hand_over  # registers the op
from fxamp.passes.backward.scale_backward import gradients
from fxamp.passes.base import Context, Result, TracedPass
from fxamp.torch_private import drop_outputs

#: Key of the output node's ``meta``: by the position of each output that is handed over, its parameter's input or None.
HANDED_OVER = "fxamp_handed_over"

#: A gradient is small if this many of them do not fill a group.
SMALL = 64


@dataclass(frozen=True)
class _Gradient:
    """One gradient and its position among the outputs.

    ``parameter``: the input that it is the gradient of, if the graph reads that. ``ready``: the position of the node
    after which it can be handed over.
    """

    place: int
    node: Node
    parameter: Node | None
    ready: int

    @property
    def bytes(self) -> int:
        value = tensor_value(self.node)
        assert value is not None
        return prod(size if isinstance(size, int) else 0 for size in value.shape) * value.element_size()


@dataclass(frozen=True)
class HandOverGradients(TracedPass[Context]):
    """Requires AOTAutograd's descriptors of outputs; ensures rule 1 for dense gradients among ``places``."""

    places: tuple[int, ...]
    group: int
    name = "hand-over-gradients"

    def requires(self, gm: GraphModule, context: Context) -> str | None:
        return None if graph_output(gm.graph).meta.get("desc") is not None else "the outputs carry no descriptors"

    def run(self, gm: GraphModule, context: Context) -> Result:
        nodes, output = list(gm.graph.nodes), graph_output(gm.graph)
        gradients = _gradients(gm, list(self._dense(gm)))
        end = len(nodes) - 2  # the last node is the output
        late = (replace(own, ready=end) if own.bytes < self.group // SMALL else own for own in gradients)
        ready = sorted(late, key=lambda gradient: gradient.ready)
        if not ready:
            return Result(0)
        writer = GraphWriter(gm.graph, context.mode)
        for members in _groups(ready, self.group):
            weights = list(dict.fromkeys(member.parameter for member in members if member.parameter is not None))
            values, places = [member.node for member in members], [member.place for member in members]
            with gm.graph.inserting_before(nodes[members[-1].ready].next):
                if weights:
                    writer.call(torch.ops.fxamp.hand_over.default, [], weights, [], near=values[-1])
                writer.call(torch.ops.fxamp.hand_over.default, values, weights, places, near=values[-1])
        names = {own.place: None if own.parameter is None else own.parameter.name for own in ready}
        output.args = (tuple(None if at in names else node for at, node in enumerate(returned(gm.graph))),)
        output.meta[HANDED_OVER] = names
        drop_outputs(output, names)
        return Result(len(names), {"gradients": len(names)})

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        left = list(self._dense(gm))
        return f"gradients at {left} are still returned" if left else None

    def _dense(self, gm: GraphModule) -> Iterator[int]:
        """Yield the positions that hold dense gradients which the graph computes."""
        results = returned(gm.graph)
        for place in gradients(gm):
            value = tensor_value(results[place])
            dense = value is not None and value.layout is torch.strided
            if place in self.places and dense and results[place].op != "placeholder":
                yield place


def _gradients(gm: GraphModule, places: list[int]) -> Iterator[_Gradient]:
    order = {node: at for at, node in enumerate(gm.graph.nodes)}
    inputs = {node: node.meta.get("desc") for node in gm.graph.find_nodes(op="placeholder")}
    first = max((order[node] for node in inputs), default=0)
    for place in places:
        node, owner = returned(gm.graph)[place], graph_output(gm.graph).meta["desc"][place].grad_of
        parameter = next((own for own, description in inputs.items() if description == owner), None)
        readers = () if parameter is None else memory_readers(parameter)
        reads = [order[reader] for reader in readers if reader.op != "output"]
        yield _Gradient(place, node, parameter, max(first, order[node], *reads))


def _groups(ready: list[_Gradient], least: int) -> Iterator[list[_Gradient]]:
    members, total = list[_Gradient](), 0
    for gradient in ready:
        members.append(gradient)
        total += gradient.bytes
        if total >= least:
            yield members
            members, total = [], 0
    if members:
        yield members
