"""cast-backward: run ops of a backward graph in the dtypes of the policy's backward rules.

The graph is AOTAutograd's, after its partition. It is derived from a forward with explicit casts, so without this pass
every gradient is computed in the dtypes of its forward.

1. Only ops of the backward are considered: a recomputed forward op must return what it returned in the forward.
2. The pass casts a covered op's eligible inputs as the rule says, and casts its results back, so that every other op
   reads its original dtypes. A value that passes between two covered ops of one dtype is not cast in between. If the
   graph itself widens a result to that dtype (the gradient of a 16-bit weight), the result is not rounded first.
3. If ``torch.autocast(enabled=False)`` was active in the forward, no rule applies to its backward.
4. If an op rejects the new dtypes, the pass restores the original ones and records why.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from fxamp.graph import GraphWriter, computed, dtype_name, dtype_of, recompute
from fxamp.passes.base import CastContext, Result, TracedPass
from fxamp.passes.shared.accepted_dtypes import rejection
from fxamp.passes.shared.autocast_regions import marked_lower
from fxamp.passes.shared.backward_ops import backward_edit, follow_input_dtype, missing_kernel
from fxamp.passes.shared.decision import Decision, decide, decision, inserted_for, overrule
from fxamp.passes.shared.saved_values import in_backward
from fxamp.passes.shared.sites import ruling_on
from fxamp.passes.shared.widening import CASTS, behind_views
from fxamp.torch_private import without_autocast

_cast = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class CastBackward(TracedPass[CastContext]):
    """Requires values on all nodes; ensures rule 2 for every op that a rule covers and that accepts its dtypes."""

    name = "cast-backward"

    def run(self, gm: GraphModule, context: CastContext) -> Result:
        writer = _Writer(gm.graph, context.mode)
        covered = 0
        with torch.no_grad(), without_autocast(), context.mode:
            for node in list(gm.graph.nodes):
                if _decide(node, context):
                    covered += writer.rewrite(node, context)
            for node in list(gm.graph.nodes):
                writer.skip_rounding(node)
        writer.erase_unused()
        return Result(covered, {"covered": covered, "inserted": len(writer.made)})

    def ensures(self, gm: GraphModule, context: CastContext) -> str | None:
        for node in gm.graph.nodes:
            choice = decision(node)
            if choice is None or choice.rule is None or choice.lower is None or choice.overruled:
                continue
            if backward_edit(choice.rule, node, choice.lower, context).casts:
                return f"node {node.name} has inputs that rule {choice.rule.id} does not allow"
        return None


def _decide(node: Node, context: CastContext) -> bool:
    """Record the rule that applies to the node; return whether there is one."""
    if not isinstance(node.target, OpOverload) or not in_backward(node):
        return False
    if decision(node) is not None or node.target._schema.is_mutable:
        return False
    ruling = ruling_on(node, context.policy, "backward")
    lower = marked_lower(node, context)
    if ruling.rule is None or lower is None:
        return False
    decide(node, Decision(ruling.rule, lower, ruling.rule.why, lost=ruling.lost))
    return True


class _Writer:
    """Writes casts into one graph, one per value and dtype; ``behind`` maps a cast back to the value it casts."""

    def __init__(self, graph: Graph, mode: FakeTensorMode) -> None:
        self._graph = graph
        self._writer = GraphWriter(graph, mode)
        self._casts: dict[tuple[Node, torch.dtype], Node] = {}
        self._behind: dict[Node, Node] = {}
        self._rounded: list[Node] = []

    @property
    def made(self) -> list[Node]:
        """The casts that are in the graph."""
        return [node for node in (*self._casts.values(), *self._behind) if not node._erased]

    def rewrite(self, node: Node, context: CastContext) -> bool:
        """Run ``node`` as its decision says; return whether that changed anything."""
        choice = decision(node)
        assert choice is not None and choice.rule is not None and choice.lower is not None
        edit = backward_edit(choice.rule, node, choice.lower, context)
        if not edit.casts:
            return True
        before = {source: source.meta.get("val") for source in node.all_input_nodes}
        arguments, value = (node.args, node.kwargs), node.meta["val"]
        for source, dtype in edit.casts.items():
            node.replace_input_with(source, self._in_dtype(source, dtype, node, choice.rule.id))
        follow_input_dtype(node)
        why = missing_kernel(node, edit) or rejection(node, before) or recompute(node)
        if why is not None:
            node.args, node.kwargs = arguments
            node.meta["val"] = value
            overrule(node, why)
            return False
        self._restore(node, value)
        return True

    def skip_rounding(self, node: Node) -> None:
        """If ``node`` casts a result back to the dtype that it was computed in, use the result itself."""
        if node.target not in CASTS or inserted_for(node):
            return
        source, views = behind_views(node.args[0])  # type: ignore[arg-type]
        wide = self._behind.get(source)
        if wide is None or not _only_converts(node, wide):
            return
        with self._graph.inserting_before(node):
            for view in reversed(views):
                source, wide = view, self._writer.copy(view, {source: wide})
        node.replace_all_uses_with(wide)
        self._rounded += [node, *views]

    def erase_unused(self) -> None:
        """Remove unused casts: those between two covered ops, and those of ops that rejected them."""
        for node in (*self._rounded, *reversed(self.made)):
            if not node.users:
                self._graph.erase_node(node)

    def _in_dtype(self, source: Node, dtype: torch.dtype, user: Node, rule: str) -> Node:
        wide = self._behind.get(source)
        if wide is not None and wide.meta["val"].dtype == dtype:
            return wide
        if (source, dtype) not in self._casts:
            with self._graph.inserting_before(user):
                self._casts[source, dtype] = self._write(source, dtype, f"for {user.name}: rule {rule}", user)
        return self._casts[source, dtype]

    def _restore(self, node: Node, before: Any) -> None:
        """Give the users of the node's results the dtypes that these had ``before``."""
        if isinstance(before, torch.Tensor):
            self._cast_back(node, before.dtype)
            return
        for user in [user for user in node.users if user.target is operator.getitem]:
            was = user.meta.get("val")
            user.meta["val"] = computed(user)
            if isinstance(was, torch.Tensor):
                self._cast_back(user, was.dtype)

    def _cast_back(self, node: Node, dtype: torch.dtype) -> None:
        if dtype_of(node) in (None, dtype):
            return
        users = list(node.users)
        with self._graph.inserting_after(node):
            back = self._write(node, dtype, f"for the users of {node.name}: the dtype they were made for", node)
        for user in users:
            user.replace_input_with(node, back)
        self._behind[back] = node

    def _write(self, source: Node, dtype: torch.dtype, why: str, near: Node) -> Node:
        cast = self._writer.call(_cast, source, dtype, near=near, why=why, name=f"{source.name}_{dtype_name(dtype)}")
        cast.meta.update({key: near.meta[key] for key in _IN_BACKWARDS if key in near.meta})
        return cast


#: The metadata that a cast inherits from its op, besides the location that every graph has.
_IN_BACKWARDS = ("fwd_nn_module_stack", "fwd_source_fn_stack", "seq_nr", "partitioner_tag")


def _only_converts(node: Node, wide: Node) -> bool:
    """Whether a cast converts to the dtype and device of ``wide`` and does nothing else."""
    before, after = wide.meta["val"], node.meta["val"]
    same = (before.dtype, before.device, before.layout) == (after.dtype, after.device, after.layout)
    return same and node.kwargs.keys() <= {"dtype", "device", "layout"}
