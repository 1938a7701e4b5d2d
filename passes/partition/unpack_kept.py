"""unpack-kept: make a backward take the outputs of pack-kept's forward, and restore the values before their first use.

1. The backward takes symbolic numbers first, then tensors in the order in which the forward returns them; inputs are
   matched by position, never by name.
2. A packed memory is unpacked once, before the first op that reads it or a view of it; views are created again.
3. Comparisons of an unpacked value with zero, which select the gradients of ReLUs, read the codes of 8-bit floats: one
   byte per element instead of two or more, if a library call needs the unpacked value in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter, graph_output, tensor_value
from fxamp.passes.base import Context, Result, TracedPass
from fxamp.passes.partition.pack_kept import Restore, number_of_parts
from fxamp.passes.shared.kept_packing import PACKED, Packing, PackWriter
from fxamp.passes.shared.saved_values import saved_places, saved_tensors
from fxamp.torch_private import calls_kernel


@dataclass(frozen=True)
class UnpackKept(TracedPass[Context]):
    """Requires the backward of the same partition.

    ``originals``: the forward's outputs after its results, before packing. ``restore``: pack-kept's plan for them.
    ``parts``: these outputs after packing. ``strides``: whether unpacked values must have the strides of the originals;
    a compiler that chooses strides itself needs them only for the ops whose kernels it calls.
    """

    originals: tuple[Any, ...]
    restore: tuple[Restore | None, ...]
    parts: tuple[Any, ...]
    strides: bool = True
    name = "unpack-kept"

    def requires(self, gm: GraphModule, context: Context) -> str | None:
        nodes, places = saved_tensors(self.originals), saved_places(gm, self.originals)
        for node, place in zip(nodes, places, strict=False):
            mine, theirs = tensor_value(node), tensor_value(place)
            if mine is None or theirs is None or _kind(mine) != _kind(theirs):
                return f"the backward takes {place.name} where the forward returns {node.name}"
        return None if len(places) == len(nodes) else "the backward takes fewer values than the forward returns"

    def relies(self, reader: Node) -> bool:
        return self.strides or calls_kernel(reader.target)

    def run(self, gm: GraphModule, context: Context) -> Result:
        places = saved_places(gm, self.originals)
        order = {node: at for at, node in enumerate(gm.graph.nodes)}
        groups: dict[int, list[tuple[Node, Restore]]] = {}
        for place, plan in zip(places, self.restore, strict=False):
            if plan is not None:
                groups.setdefault(plan.first, []).append((place, plan))
        with context.computing():
            for first, members in groups.items():
                strides = self.strides or any(plan.views for _, plan in members)
                _unpack(gm, context, places[first], self._parts_of(first), members, order, strides)
        return Result(len(groups), {"unpacked": len(groups)})

    def _parts_of(self, first: int) -> Sequence[Node]:
        before, plan = number_of_parts(self.restore[:first]), self.restore[first]
        assert plan is not None
        return self.parts[before : before + plan.packing.parts]


def _unpack(
    gm: GraphModule,
    context: Context,
    place: Node,
    parts: Sequence[Node],
    members: Sequence[tuple[Node, Restore]],
    order: dict[Node, int],
    strides: bool,
) -> None:
    writer = GraphWriter(gm.graph, context.mode)
    inputs = []
    for suffix, part in zip(("packed", "scale"), parts, strict=False):
        with gm.graph.inserting_before(place):
            taken = gm.graph.placeholder(f"{place.name}_{suffix}")
        taken.meta.update({key: part.meta[key] for key in ("val", *_ORIGIN) if key in part.meta})
        taken.meta[PACKED] = True
        inputs.append(taken)
    users = [user for member, _ in members for user in member.users]
    with gm.graph.inserting_before(min(users, key=lambda user: order[user], default=graph_output(gm.graph))):
        value = PackWriter(writer).unpack(inputs, members[0][1].packing, strides)
        for member, plan in members:
            replaced = {plan.views[0].all_input_nodes[0]: value} if plan.views else {}
            result = value
            for view in plan.views:
                result = writer.copy(view, replaced)
                replaced[view] = result
            if not plan.views:
                _compare_codes(member, inputs[0], plan.packing, writer, strides)
            member.replace_all_uses_with(result)
    for member, _ in members:
        gm.graph.erase_node(member)


#: Metadata that tells where a value comes from.
_ORIGIN = ("stack_trace", "nn_module_stack", "original_aten")


def _compare_codes(member: Node, codes: Node, packing: Packing, writer: GraphWriter, strides: bool) -> None:
    comparisons = [user for user in member.users if user.target in _COMPARISONS and user.args[1:] == (0,)]
    if comparisons and packing.has_signs:
        signs = PackWriter(writer).unpack_signs(codes, packing, strides)
        for user in comparisons:
            user.replace_input_with(member, signs)


_COMPARISONS = tuple(getattr(torch.ops.aten, name).Scalar for name in ("le", "lt", "ge", "gt"))


def _kind(value: torch.Tensor) -> tuple[object, ...]:
    return value.dtype, value.device, [size if isinstance(size, int) else None for size in value.shape]
