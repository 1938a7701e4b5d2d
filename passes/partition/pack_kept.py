"""pack-kept: save tensors for the backward in the form that the policy's keep rules (region "kept") ask for.

1. The forward's results do not change. The saved tensors, its further outputs, are replaced at their positions.
2. Views of one memory count as one value, which is packed once: right after it is computed, or after the convolution
   that reads it.
3. Values that need no extra memory (inputs, constants, results, views of them), and values without a rule, stay.
4. ``output.meta[RESTORE]`` describes for every position how unpack-kept restores it;
   ``output.meta[KEPT_VALUES]`` describes for reports what happened to each memory.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter, dtype_name, graph_output, module_path, returned, tensor_value
from fxamp.graph_text import KeptValue, RuleRef
from fxamp.passes.base import CastContext, Result, TracedPass
from fxamp.passes.shared.kept_packing import Packing, PackWriter, plan_packing
from fxamp.passes.shared.saved_values import (
    KeepDecision,
    Memory,
    keep_decision,
    memories,
    names_of,
    producer,
    saved,
    stored_bytes,
    view_base,
)
from fxamp.policy import KeepRule
from fxamp.policy.model.keep_rule import Keep

#: Key of the forward's output node's ``meta``: a :class:`Restore` or None for each position after the results.
RESTORE = "fxamp_restore"

#: Key of the same ``meta``: a :class:`fxamp.graph_text.model.KeptValue` for each memory, in the order of positions.
KEPT_VALUES = "fxamp_kept_values"


@dataclass(frozen=True)
class Restore:
    """How the backward restores the saved value at one position.

    ``first``: the first position that saves this memory, where its packed parts go. ``views``: the forward's nodes
    that lead from the unpacked value to this one.
    """

    packing: Packing
    first: int
    views: tuple[Node, ...] = ()


@dataclass(frozen=True)
class PackKept(TracedPass[CastContext]):
    """Requires values on all nodes of a partitioned forward; ``results`` is the number of its results.

    ``inspected``: the graph runs on the CPU, but must show what would happen on the policy's device.
    """

    results: int
    inspected: bool = False
    name = "pack-kept"

    @property
    def outputs(self) -> int:
        return self.results

    def run(self, gm: GraphModule, context: CastContext) -> Result:
        output = graph_output(gm.graph)
        if RESTORE in output.meta:
            return Result(0)
        originals = saved(gm, self.results)
        restore: list[Restore | None] = [None] * len(originals)
        parts: dict[int, list[Node]] = {}
        values = []
        writer = GraphWriter(gm.graph, context.mode)
        with context.computing():
            for memory in memories(gm, self.results):
                decided = keep_decision(memory, context)
                plan = _plan(memory, decided, context.policy.device if self.inspected else "")
                if isinstance(plan, Packing):
                    node, parts[memory.at[0]] = _pack(memory, plan, decided.rule, writer)
                    for at, view in zip(memory.at, memory.views, strict=True):
                        restore[at] = Restore(plan, memory.at[0], _views(node, view))
                values.append(_report(memory, decided, plan, parts.get(memory.at[0])))
        _return_parts(output, self.results, restore, parts)
        output.meta[RESTORE], output.meta[KEPT_VALUES] = tuple(restore), tuple(values)
        return Result(len(parts), {"packed": len(parts)})

    def ensures(self, gm: GraphModule, context: CastContext) -> str | None:
        total, count = number_of_parts(graph_output(gm.graph).meta[RESTORE]), len(saved(gm, self.results))
        return None if count == total else f"the forward returns {count} kept values, but {total} were planned"


def number_of_parts(restore: Sequence[Restore | None]) -> int:
    """Return how many outputs of a packed forward stand for its first ``len(restore)`` saved values."""
    return sum(1 if plan is None else plan.packing.parts if plan.first == at else 0 for at, plan in enumerate(restore))


def _plan(memory: Memory, decided: KeepDecision, place: str) -> Packing | str:
    """Return how to pack ``memory``, or why not; ``place``: the type of the device to pack for, "" for its own."""
    rule = decided.rule
    rounds = rule is not None and rule.keep is not Keep.HOST
    if rule is None or (decided.reason and rounds):  # reasons are about rounding
        return decided.reason
    if rule.keep is Keep.AS_IS:
        return rule.why
    if _is_statistic(memory.owner, "batch_norm" if rule.keep is Keep.HOST else "_norm"):
        return "it is a statistic of a norm, whose dtype only the kernel knows"
    if rule.keep is Keep.RECOMPUTE:
        return "the partitioner saves it anyway"
    node = _packed_node(memory, rule)
    value = tensor_value(node)
    assert value is not None
    plan = plan_packing(value, rule, place)
    symbolic = [n for view in memory.views for n in _views(node, view) if _reads_numbers(n)]
    return "its views have sizes that are not known" if symbolic and isinstance(plan, Packing) else plan


def _is_statistic(owner: Node, norms: str) -> bool:
    """Whether ``owner`` is a statistic of an op whose name contains ``norms``.

    A batch norm's have a dtype that depends on the kernel everywhere, a layer or group norm's on CPUs only, where no
    value is sent to the host.
    """
    return owner.target is operator.getitem and bool(owner.args[1]) and norms in str(producer(owner).target)


def _packed_node(memory: Memory, rule: KeepRule) -> Node:
    """Return the node to pack: the saved value if it is the only one and fills its memory, else the memory's owner.

    For the host it is the owner, which can be copied as soon as it exists: the partitioner creates the views that the
    backward needs at the end of the forward.
    """
    owner, views = memory.owner, memory.views
    if rule.keep is Keep.HOST and not any(_reads_numbers(n) for view in views for n in _views(owner, view)):
        return owner
    if len(views) == 1 and _elements(views[0]) == _elements(owner) and _filled(views[0]):
        return views[0]
    return owner


def _elements(node: Node) -> object:
    value = tensor_value(node)
    return None if value is None else value.numel()


def _filled(node: Node) -> bool:
    value = tensor_value(node)
    return value is not None and 0 not in [stride for stride in value.stride() if isinstance(stride, int)]


def _views(source: Node, node: Node) -> tuple[Node, ...]:
    """Return the nodes from ``source``, exclusive, to its view ``node``, inclusive."""
    path: list[Node] = []
    while node is not source:
        path.append(node)
        owner = node.args[0]
        if isinstance(owner, Node) and view_base(node) is not owner:  # a getitem from several views
            path.append(owner)
        source_of = view_base(node)
        assert source_of is not None
        node = source_of
    return tuple(reversed(path))


def _reads_numbers(view: Node) -> bool:
    return any(not isinstance(n.meta.get("val"), (Tensor, list, tuple)) for n in view.all_input_nodes)


def _pack(memory: Memory, packing: Packing, rule: KeepRule | None, writer: GraphWriter) -> tuple[Node, list[Node]]:
    """Return the node that is packed, and the parts that it becomes."""
    assert rule is not None
    node = _packed_node(memory, rule)
    with writer.graph.inserting_before(_place(node)):
        parts = PackWriter(writer).pack(node, packing, f"kept for the backward: rule {rule.id}")
    for part in parts:
        part.meta.update({key: node.meta[key] for key in _OF_SAVED_NODES if key in node.meta})
    return node, parts


def _place(node: Node) -> Node:
    """Return the node before which to pack ``node``: the next one, or the one after the convolution that reads it.

    The first reader of a value that Inductor writes to memory, such as a pooling's result, determines its layout. A
    convolution needs channels innermost: if packing came first, the convolution would copy the value.
    """
    target = producer(node).target
    fused = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    reader = None if fused else next((user for user in node.users if user.target is _CONVOLUTION), None)
    return (reader or node).next


_CONVOLUTION = torch.ops.aten.convolution.default

#: Metadata that AOTAutograd reads on nodes that it saves.
_OF_SAVED_NODES = ("saved_tensor_with_no_vc_check",)


def _return_parts(output: Node, results: int, restore: list[Restore | None], parts: dict[int, list[Node]]) -> None:
    """Replace the saved values by their packed parts, with AOTAutograd's descriptors."""
    before, described = returned(output.graph), output.meta.get("desc")
    values: list[Any] = []
    descriptions: list[Any] = []
    for at, node in enumerate(before[results:]):
        place = parts.get(at, []) if restore[at] is not None else [node]
        values += place
        if described is not None:
            descriptions += [described[results + at]] * len(place)
    output.args = ((*before[:results], *values),)
    if described is not None:
        output.meta["desc"] = [*described[:results], *descriptions]


def _report(memory: Memory, decided: KeepDecision, plan: Packing | str, parts: list[Node] | None) -> KeptValue:
    value = tensor_value(memory.owner)
    assert value is not None
    before = stored_bytes([value])
    sent = isinstance(plan, Packing) and plan.form is Keep.HOST
    after = before if parts is None else 0 if sent else stored_bytes([part.meta["val"] for part in parts])
    form = plan.words if isinstance(plan, Packing) else dtype_name(value.dtype)
    reason = "" if isinstance(plan, Packing) else plan
    return kept_value(memory.owner, memory.views[0].name, decided.rule, form, (before, after), reason)


def kept_as_they_are(gm: GraphModule, results: int) -> tuple[KeptValue, ...]:
    """Return the report entries for the values that a partitioned forward saves, without any rules for them."""
    return tuple(_report(memory, KeepDecision(None), "", None) for memory in memories(gm, results))


def kept_value(
    node: Node, name: str, rule: KeepRule | None, form: str, sizes: tuple[int | None, int | None], reason: str = ""
) -> KeptValue:
    """Return the report entry for the value of ``node``, called ``name``; ``sizes``: bytes before and after."""
    value, source = tensor_value(node), producer(node)
    assert value is not None
    shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    ref = None if rule is None else RuleRef(rule.id, str(rule.origin or ""), rule.asks, rule.why)
    why = reason or ("" if rule is None else rule.why)
    place = names_of(source)[-1], module_path(source), dtype_name(value.dtype), shape
    return KeptValue(name, *place, form, *sizes, ref, why)
