"""restore-outputs: return the outputs of a compiled graph in the dtypes that it was captured with.

Dynamo traces the code after a graph break with the captured dtypes; a 16-bit tensor would fail there with float32
weights. Under policies with ``outputs = "keep"`` the program's own results have the dtypes that the casts produce
instead: what the compiled call returns. What a function reads that Dynamo skips is restored, as before a break.

1. A floating-point output that is narrower than its captured dtype is widened.
2. An output that was captured in 16 bits, and is now wider or in the other 16-bit dtype, gets the captured dtype only
   if the program continues with 16-bit tensors (``narrow_outputs`` of the context): autocast would not change it.
3. Outputs that share memory still share it: their common base is cast once, and they become the same views of that
   cast, even if a checkpoint's body makes the views. A tensor that is returned twice stays one tensor.
4. No gradient flows where it did not flow before: values computed with gradients off are detached, and if the graph
   ends with gradients off, casts of values computed with gradients on are inserted with gradients on.
"""

import operator
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxamp.capture import OUTPUT_DTYPES
from fxamp.graph import (
    AliasSets,
    GraphWriter,
    dtype_of,
    fake_tensors,
    graph_output,
    has_strides,
    is_data,
    nodes_with_gradients,
    returned,
    same_strides,
    tensor_value,
)
from fxamp.graph.aliases import alias_of, aliased_inputs, is_view, unchanged_input
from fxamp.graph.higher_order_ops import bodies
from fxamp.passes.base import CastContext, Pass, Result
from fxamp.passes.shared.cast_writer import CastWriter

_WHY = "the captured output dtype"


@dataclass(frozen=True)
class RestoreOutputs(Pass[CastContext]):
    """Requires the captured dtypes on the output node; ensures rules 1 and 2."""

    name = "restore-outputs"

    def requires(self, gm: GraphModule, context: CastContext) -> str | None:
        return None if OUTPUT_DTYPES in graph_output(gm.graph).meta else "the output node lacks the captured dtypes"

    def run(self, gm: GraphModule, context: CastContext) -> Result:
        if _keeps(context):
            return Result(0)
        output = graph_output(gm.graph)
        casts = CastWriter(gm.graph, grad=False)
        leaves, spec = pytree.tree_flatten(output.args[0])
        wrong = _wrong(output, context)
        learning = nodes_with_gradients(gm.graph, torch.is_grad_enabled())
        rebuilder = _Rebuilder(output, casts, context.mode, AliasSets(gm.graph), learning)
        switched = bool(wrong) and bool(learning) and output not in learning
        with context.computing():
            if switched:
                _switch_gradients(output, True)
            for index, dtype in wrong.items():
                leaves[index] = rebuilder.restore(leaves[index], dtype)
            if switched:
                _switch_gradients(output, False)
        if wrong:
            output.args = (pytree.tree_unflatten(leaves, spec),)
        return Result(len(wrong), {"outputs restored": len(wrong)})

    def ensures(self, gm: GraphModule, context: CastContext) -> str | None:
        wrong = _wrong(graph_output(gm.graph), context)
        if _keeps(context) or not wrong:
            return None
        return f"outputs {sorted(wrong)} have different dtypes than captured"


class _Rebuilder:
    """Returns outputs in their captured dtype: by a cast, or as views of the cast of their common base.

    ``learning``: the nodes where gradients are on.
    """

    def __init__(
        self, output: Node, casts: CastWriter, mode: FakeTensorMode, aliases: AliasSets, learning: set[Node]
    ) -> None:
        self._output = output
        self._casts = casts
        self._mode = mode
        self._writer = GraphWriter(output.graph, mode)
        self._aliases = aliases
        self._learning = learning
        self._made: dict[tuple[Node, torch.dtype], Node] = {}
        self._copies: dict[tuple[Node, torch.dtype], Node] = {}

    def restore(self, node: Node, dtype: torch.dtype) -> Node:
        """Return ``node`` in ``dtype``; the same result for the same node."""
        return self._rebuilt(node, dtype) if self._shares_memory(node) else self._cast(node, dtype)

    def _shares_memory(self, node: Node) -> bool:
        outputs = [leaf for leaf in pytree.tree_leaves(self._output.args[0]) if isinstance(leaf, Node)]
        others = (other for other in outputs if other is not node and not _have_separate_memory(node, other))
        return any(self._aliases.shared(node, other) for other in others)

    def _rebuilt(self, node: Node, dtype: torch.dtype) -> Node:
        if (node, dtype) not in self._made:
            self._made[node, dtype] = self._build(node, dtype)
        return self._made[node, dtype]

    def _build(self, node: Node, dtype: torch.dtype) -> Node:
        """Rebuild the node from the cast of the value that it is a view of. All writes happen before the outputs."""
        same = alias_of(node) or unchanged_input(node)
        if same is not None:
            return self._rebuilt(same, dtype)
        call, sources = _view(node)
        if not sources:
            inside = _views_in_body(node, self._learning, self._mode)
            if inside is None:
                return self._cast(node, dtype)
            source, views = inside
            copy = self._rebuilt(source, dtype)
            for view in views:
                copy = self._copy(view, {view.all_input_nodes[0]: copy})
            return copy
        if (call, dtype) not in self._copies:
            self._copies[call, dtype] = self._copy(call, {source: self._rebuilt(source, dtype) for source in sources})
        return self._copies[call, dtype] if call is node else self._copy(node, {call: self._copies[call, dtype]})

    def _copy(self, node: Node, sources: dict[Node, Node]) -> Node:
        with self._output.graph.inserting_before(self._output):
            copy = self._writer.copy(node, sources)
            if node in self._learning or not self._learning or tensor_value(node) is None:
                return copy
            return self._writer.call(torch.ops.aten.detach.default, copy, near=node, why=_WHY)

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        return self._casts.cast(node, dtype, self._output, _WHY) if tensor_value(node) is not None else node


def _views_in_body(pick: Node, learning: set[Node], mode: FakeTensorMode) -> tuple[Node, list[Node]] | None:
    """Return the value that ``pick``, a result of a checkpoint, is a view of, and the body's calls that make the view.

    The value is an operand or another result of the checkpoint, a new one if necessary. None for any other node. Calls
    made with gradients enabled are added to ``learning``, which holds those around the checkpoint.
    """
    owner, index = pick.args if pick.target is operator.getitem else (None, None)
    known = bodies(owner) if isinstance(owner, Node) else []
    if len(known) != 1 or not isinstance(owner, Node):
        return None
    graph = known[0].module.graph
    learning |= nodes_with_gradients(graph, owner in learning)
    results = returned(graph)
    root, views = _base(results[index], learning, mode)
    operands = dict(zip(graph.find_nodes(op="placeholder"), known[0].operands, strict=True))
    if root in operands:
        return (operands[root], views) if isinstance(operands[root], Node) else None
    if not views:
        return None
    if root not in results:
        graph_output(graph).args = ((*results, root),)
        owner.meta["val"] = (*owner.meta["val"], root.meta["val"])
    at = [*results, root].index(root)
    others = [user for user in owner.users if user.target is operator.getitem and user.args[1] == at]
    with owner.graph.inserting_after(owner):
        return (others or [GraphWriter(owner.graph, mode).item(owner, at)])[0], views


def _base(node: Node, learning: set[Node], mode: FakeTensorMode) -> tuple[Node, list[Node]]:
    """Return the first value that ``node`` is a view of, and the calls that make the view of it, in order."""
    views: list[Node] = []
    while True:
        same = alias_of(node) or unchanged_input(node)
        if same is not None:
            node = same
            continue
        call, sources = _view(node)
        if len(sources) == 1 and call.all_input_nodes == sources:
            source, made = sources[0], [node] if call is node else [call, node]
        else:
            inside = _views_in_body(node, learning, mode)
            if inside is None:
                return node, views
            source, made = inside
        views[:0], node = made, source


def _have_separate_memory(one: Node, other: Node) -> bool:
    """Whether two results of one call, such as those of ``meshgrid``, do not share memory."""
    picked = one.target is operator.getitem and other.target is operator.getitem
    return picked and one.args[0] is other.args[0] and _memory(one).isdisjoint(_memory(other))


def _switch_gradients(output: Node, on: bool) -> None:
    with output.graph.inserting_before(output):
        output.graph.call_function(torch._C._set_grad_enabled, (on,))


def _view(node: Node) -> tuple[Node, list[Node]]:
    """Return the call that makes ``node``, or the views of which it picks one, and the inputs that it is a view of."""
    picked = node.target is operator.getitem and aliased_inputs(node) == [node.args[0]]
    call = node.all_input_nodes[0] if picked else node
    return call, _viewed(call, node)


def _viewed(call: Node, result: Node) -> list[Node]:
    """Return the inputs of ``call`` that ``result`` is a view of, so that a call on other inputs gives a view of those.

    An op without alias annotations (``einsum``, ``dropout``) returns a view of its input or a new tensor. If an op has
    several results (``broadcast_tensors``), each is a view of one input; inputs of its dtype may have to agree.
    """
    sources = aliased_inputs(call)
    if not isinstance(call.target, OpOverload):
        return sources if is_data(call) else []
    if call.target is torch.ops.aten.contiguous.default and _moves(call):
        return []
    if is_view(call) and len(sources) == 1:
        return sources
    if all(_memory(result).isdisjoint(_memory(source)) for source in sources):
        return []
    return [source for source in sources if dtype_of(source) == dtype_of(result)]


def _moves(contiguous: Node) -> bool:
    """Whether the op copies: its result has different strides than its input."""
    before, after = tensor_value(contiguous.args[0]), tensor_value(contiguous)
    return has_strides(before) and has_strides(after) and not same_strides(before, after)


def _memory(node: Node) -> set[int]:
    tensors = fake_tensors(node.meta["val"])
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}


def _keeps(context: CastContext) -> bool:
    """Whether outputs stay in the dtypes that the casts give: not where code with float32 weights reads them."""
    return context.policy.outputs == "keep" and not context.read_inside


def _wrong(output: Node, context: CastContext) -> dict[int, torch.dtype]:
    """Return, by position, the captured dtype of each floating-point output that violates rule 1 or 2."""
    wrong: dict[int, torch.dtype] = {}
    captured: list[torch.dtype | None] = output.meta[OUTPUT_DTYPES]
    for index, (leaf, dtype) in enumerate(zip(pytree.tree_leaves(output.args[0]), captured, strict=True)):
        value = tensor_value(leaf)
        if value is None or dtype is None or not value.is_floating_point() or value.dtype == dtype:
            continue
        if context.narrow_outputs or value.dtype.itemsize < dtype.itemsize:
            wrong[index] = dtype
    return wrong
