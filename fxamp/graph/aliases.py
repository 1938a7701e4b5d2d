"""Which values of a graph may share memory, and which of them are written to."""

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fxamp.graph.arguments import argument, arguments
from fxamp.graph.higher_order_ops import autograd_function, bodies, gradient_hook
from fxamp.graph.nodes import ENTER_AUTOCAST, EXIT_AUTOCAST, fake_tensors, is_mutable, returned, tensor_value
from fxamp.graph.opaque_writes import is_functional, written_inputs
from fxamp.graph.tensor_wrappers import follows_input
from fxamp.policy.model.op_names import aten_ops


class AliasSets:
    """A union-find over the nodes of one graph: values that may share storage are in one set.

    Views are detected by the alias annotations of their op's schema, and by a table of ops that may return an input
    although their schemas do not say so. A higher-order op is analysed by its bodies if they are known; a scan, a map
    or a loop aliases nothing, unless its body writes. Any other call without a schema is assumed to alias everything
    that it reads. A conversion aliases its input only if both have the same dtype. ``mutated(node)`` is true if
    anything in the graph may write to the memory of ``node``: a copy of such a value, for example an inserted cast, is
    stale after the write.
    """

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Node, Node] = {}
        for node in graph.nodes:
            for source in aliased_inputs(node):
                self._union(node, source)
        written = [source for node in graph.nodes for source in writes(node)]
        self._written = {self._find(node) for node in written}

    def mutated(self, node: Node) -> bool:
        """Whether any op of the graph may write to the memory of ``node``."""
        return self._find(node) in self._written

    def shared(self, a: Node, b: Node) -> bool:
        """Whether ``a`` and ``b`` may share memory."""
        return self._find(a) is self._find(b)

    def of(self, nodes: Sequence[Node]) -> set[Node]:
        """Return ``nodes`` and all nodes that may share memory with one of them."""
        roots = {self._find(node) for node in nodes}
        shared = {*self._parent, *self._parent.values()} if roots else set()
        return {*nodes, *(node for node in shared if self._find(node) in roots)}

    def _find(self, node: Node) -> Node:
        root = node
        while (up := self._parent.get(root, root)) is not root:
            root = up
        while (up := self._parent.get(node, node)) is not root:
            self._parent[node] = root
            node = up
        return root

    def _union(self, a: Node, b: Node) -> None:
        self._parent[self._find(a)] = self._find(b)


def is_view(node: Node) -> bool:
    """Whether the schema of the node's op says that its result shares memory with an input."""
    return isinstance(node.target, OpOverload) and any(result.alias_info for result in node.target._schema.returns)


#: Views of AOTAutograd's graphs whose schemas do not say so; one of several views.
_UNANNOTATED_VIEWS = (torch.ops.aten._unsafe_view.default, torch.ops.aten.unsafe_split.Tensor, operator.getitem)


def memory_readers(node: Node) -> Iterator[Node]:
    """Yield the nodes that read the memory of ``node`` in a graph of AOTAutograd's, directly or through views."""
    for user in node.users:
        yield user
        if is_view(user) or user.target in _UNANNOTATED_VIEWS:
            yield from memory_readers(user)


#: Ops that may return an input, or a view of one, although their schemas do not say so; found by running ATen's ops.
_UNANNOTATED = aten_ops("""
    _to_cpu alpha_dropout atleast_1d atleast_2d atleast_3d broadcast_tensors cartesian_prod dropout einsum
    feature_alpha_dropout feature_dropout meshgrid sum_to_size set_ type_as unsafe_chunk unsafe_split
    unsafe_split_with_sizes
""")

#: Ops that return their input if it already has the requested dtype, else a converted copy.
_CONVERSIONS = frozenset({"aten::to", "aten::type_as", "aten::_to_cpu", "aten::_autocast_to_full_precision"})


def aliased_inputs(node: Node) -> list[Node]:
    """Return the inputs whose memory the result of ``node`` may share; for one of several results, earlier ones too."""
    if node.op in ("placeholder", "get_attr", "output") or _effects(node) or is_functional(node):
        return []
    if node.target is operator.getitem:
        return _aliased_by_pick(node)
    inputs = [source for source in node.all_input_nodes if fake_tensors(source.meta.get("val"))]
    if not isinstance(node.target, OpOverload):
        return inputs
    if node.target._schema.name in _CONVERSIONS and _converts(node):
        return []
    if node.target._schema.name in _UNANNOTATED:
        return inputs
    return _annotated(node) if is_view(node) else []


def alias_of(node: Node) -> Node | None:
    """Return the earlier node for the same tensor as ``node``: the target of an in-place call, or an equal getitem.

    None for every other node, including views.
    """
    sources = aliased_inputs(node)
    if len(sources) != 1:
        return None
    if is_mutable(node):
        return sources[0]
    if node.target is not operator.getitem:
        return None
    owner, index = node.args
    if not isinstance(owner, Node) or not isinstance(index, int):
        return None
    if sources[0].target is operator.getitem and sources[0].args == node.args:
        return sources[0]
    known = [effect for effect in _effects(owner) if effect.identity.get(index) is sources[0]]
    return sources[0] if known and len(known) == len(_effects(owner)) else None


def unchanged_input(node: Node) -> Node | None:
    """Return the input that a conversion returns unchanged because there is nothing to convert; else None."""
    if not isinstance(node.target, OpOverload) or node.target._schema.name not in _CONVERSIONS:
        return None
    source = node.args[0]
    before, after = tensor_value(source), tensor_value(node)
    if before is None or after is None or (before.dtype, before.device) != (after.dtype, after.device):
        return None
    if argument(node, "copy") or argument(node, "memory_format") not in (None, torch.preserve_format):
        return None
    return source if isinstance(source, Node) else None


def writes(node: Node) -> list[Node]:
    """Return the inputs that ``node`` may write to: by its schema, or by its bodies; all tensors for an opaque call.

    The running statistics of a batch norm are included.
    """
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    effects = _effects(node)
    if effects:
        return [source for effect in effects for source in effect.written]
    if isinstance(node.target, HigherOrderOperator):
        return written_inputs(node)
    if not isinstance(node.target, OpOverload):
        pure = node.target in _PURE_FUNCTIONS or follows_input(node)
        return [] if pure else [source for source in node.all_input_nodes if tensor_value(source) is not None]
    return [
        leaf
        for argument, value in arguments(node)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in _HIDDEN_WRITES
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Node)
    ]


#: Arguments that batch norms write to in training, although most of their schemas do not say so.
_HIDDEN_WRITES = frozenset({"running_mean", "running_var"})

_PURE_FUNCTIONS = frozenset(
    {operator.getitem, torch._C._set_grad_enabled, torch.autograd.grad, ENTER_AUTOCAST, EXIT_AUTOCAST}
)


@dataclass(frozen=True)
class _Effect:
    """What one body of a higher-order op does to the operands.

    ``aliased``: for each result, the operands that it may share memory with. ``shared``: for each result, the earlier
    results that it may share memory with. ``identity``: for each result, the operand that it is, even after a write
    that a Function marks dirty. ``written``: the operands that are written to.
    """

    aliased: dict[int, list[Node]]
    shared: dict[int, list[int]]
    identity: dict[int, Node]
    written: list[Node]


def _effects(node: Node) -> list[_Effect]:
    """Return an effect for each body of a higher-order op if the bodies are known; empty for every other node."""
    function, hook = autograd_function(node), gradient_hook(node)
    if hook is not None:
        return [_effect(hook.module, (None, *hook.operands[1:]))]
    if function is not None:
        dirty: Any = node.kwargs.get("dirty_idx", ())
        return [_effect(function.forward.module, function.forward.operands, saves=True, dirty=dirty)]
    return [_effect(body.module, body.operands) for body in bodies(node)]


def _effect(body: GraphModule, operands: tuple[Any, ...], saves: bool = False, dirty: Collection[int] = ()) -> _Effect:
    sets = AliasSets(body.graph)
    results = list(enumerate(pytree.tree_leaves(returned(body.graph)[0] if saves else returned(body.graph))))
    bound = [
        (inside, outside)
        for inside, outside in zip(body.graph.find_nodes(op="placeholder"), operands, strict=True)
        if isinstance(outside, Node) and tensor_value(outside) is not None
    ]
    tensors = [(i, result) for i, result in results if tensor_value(result) is not None]
    return _Effect(
        {i: [outside for inside, outside in bound if sets.shared(result, inside)] for i, result in tensors},
        {i: [k for k, other in tensors if k < i and sets.shared(result, other)] for i, result in tensors},
        {
            i: at
            for i, result in tensors
            for inside, at in bound
            if inside is (_first(result) if i in dirty else result)
        },
        [outside for inside, outside in bound if sets.mutated(inside)],
    )


def _first(node: Node) -> Node:
    """Return the first node for the tensor of ``node``."""
    earlier = alias_of(node)
    return node if earlier is None else _first(earlier)


def _aliased_by_pick(node: Node) -> list[Node]:
    source, index = node.args
    if not isinstance(source, Node) or tensor_value(source) is not None or not isinstance(index, int):
        return node.all_input_nodes
    effects = _effects(source)
    if not effects and aliased_inputs(source):
        return [source]
    picks = {pick.args[1]: pick for pick in reversed(source.users) if pick.target is operator.getitem}
    if picks[index] is not node:
        return [picks[index]]
    aliased = dict.fromkeys(operand for effect in effects for operand in effect.aliased.get(index, ()))
    earlier = {k for effect in effects for k in effect.shared.get(index, ()) if k in picks}
    return [*aliased, *(picks[k] for k in sorted(earlier))]


def _converts(node: Node) -> bool:
    """Whether a conversion creates a new tensor: of another dtype, or a copy that the program asks for."""
    before, after = tensor_value(node.args[0]), tensor_value(node)
    return argument(node, "copy") is True or (before is not None and after is not None and before.dtype != after.dtype)


def _annotated(node: Node) -> list[Node]:
    """Return the inputs that the result shares memory with, by the schema."""
    aliased = (value for argument, value in arguments(node) if argument.alias_info is not None)
    leaves = (leaf for value in aliased for leaf in (value if isinstance(value, (list, tuple)) else [value]))
    return [leaf for leaf in leaves if isinstance(leaf, Node)]
