"""The memory that a partitioned forward saves for its backward: the op that computed it, its readers, and its rule.

AOTAutograd saves nodes, several of which may be views of one memory. This module counts memory, which is saved once.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fxamp.graph import op_name, returned, tensor_value
from fxamp.graph.aliases import is_view
from fxamp.graph_text.totals import total
from fxamp.passes.base import CastContext
from fxamp.passes.shared.autocast_regions import marked_lower
from fxamp.passes.shared.sites import site_of, with_result
from fxamp.passes.shared.widening import CASTS
from fxamp.policy import KeepRule
from fxamp.policy.model.keep_rule import EIGHT_BITS, Keep
from fxamp.policy.model.site import KEPT
from fxamp.torch_private import hint, is_kept_exactly

#: Views whose schemas have no alias annotations.
_HIDDEN_VIEWS = frozenset({torch.ops.aten._unsafe_view.default, torch.ops.aten.unsafe_split.Tensor})


_COPIES = frozenset({torch.ops.aten.clone.default})

#: Key of ``node.meta``: a ``CheckpointPolicy``, which torch's partitioners read. If torch renames it, marks have no
#: effect: rules recompute nothing, and reports show the values as saved.
PARTITIONERS_MARK = "recompute"

#: Key of the ``meta`` of a value that depends on no input with a gradient.
_WITHOUT_GRADIENT = "fxamp_without_gradient"

#: Key of the ``meta`` of a saved value: a :class:`Jump` that the backward recomputes from it.
JUMP = "fxamp_jump"

#: The forms that round values.
_LOSSY = frozenset({*EIGHT_BITS, Keep.BFLOAT16, Keep.FLOAT16})

#: The lossy forms in which a value other than zero stays so, with its sign.
_WITH_SIGN = frozenset({Keep.FLOAT8_E4M3FN, Keep.FLOAT8_E5M2, Keep.BFLOAT16})


@dataclass(frozen=True)
class Jump:
    """The op of a function that is not continuous, or is infinite.

    ``at_zero``: only where the saved value itself is zero.
    """

    op: str
    at_zero: bool = False


@dataclass(frozen=True)
class Memory:
    """Saved memory: the value that owns it, and its saved views, by position.

    ``at`` are positions among the forward's outputs after its results.
    """

    owner: Node
    at: tuple[int, ...]
    views: tuple[Node, ...]


@dataclass(frozen=True)
class KeepDecision:
    """The rule for one memory, None if there is none; and why it was not applied, ``""`` if it was."""

    rule: KeepRule | None
    reason: str = ""


def mark_without_gradient(gm: GraphModule, results: int) -> None:
    """Mark the forward's values in the joint graph ``gm`` that depend on no input with a gradient.

    After its ``results`` the graph returns a gradient, or None, for each input.
    """
    gradients = zip(gm.graph.find_nodes(op="placeholder"), saved(gm, results), strict=False)
    carrying = {node for node, gradient in gradients if isinstance(gradient, Node)}
    for node in gm.graph.nodes:
        if node.op != "call_function" or in_backward(node):
            continue
        if carrying.isdisjoint(node.all_input_nodes):
            node.meta[_WITHOUT_GRADIENT] = True
        else:
            carrying.add(node)


def saved(gm: GraphModule, results: int) -> Sequence[Any]:
    """Return the outputs of the forward ``gm`` after its first ``results`` ones."""
    return tuple(returned(gm.graph)[results:])


def saved_tensors(values: Sequence[Any]) -> list[Node]:
    """Return the tensors among ``values``, what a forward saves; symbolic numbers come last and are left out."""
    return [node for node in values if tensor_value(node) is not None]


def saved_places(backward: GraphModule, values: Sequence[Any]) -> list[Node]:
    """Return the inputs of ``backward`` for the tensors among ``values``, in their order; numbers come first."""
    numbers = sum(_is_number(node) for node in values)
    return list(backward.graph.find_nodes(op="placeholder"))[numbers : numbers + len(saved_tensors(values))]


def memories(gm: GraphModule, results: int) -> list[Memory]:
    """Return the memory that is saved only for the backward, in the order of the forward's outputs.

    Memory that exists anyway is left out: inputs, constants, results, and values that share memory with them.
    """
    there = [node for node in returned(gm.graph)[:results] if isinstance(node, Node)]
    there += [node for node in gm.graph.nodes if node.op in ("placeholder", "get_attr")]
    owners_there = {owner(node) for node in there}
    storages_there = {key for node in there if (key := _storage(node)) is not None}
    groups: dict[Node, list[tuple[int, Node]]] = {}
    for at, node in enumerate(saved(gm, results)):
        if tensor_value(node) is None or owner(node) in owners_there or _storage(node) in storages_there:
            continue
        groups.setdefault(owner(node), []).append((at, node))
    return [Memory(own, *map(tuple, zip(*members, strict=True))) for own, members in groups.items()]


def owner(node: Node) -> Node:
    """Return the node that allocated the memory of ``node``, before all views."""
    while (source := view_base(node)) is not None:
        node = source
    return node


def view_base(node: Node) -> Node | None:
    """Return the node that ``node`` is a view of, even as one of several views; None if it is not a view."""
    call = node.args[0] if node.target is operator.getitem else node
    if not isinstance(call, Node) or not call.args:
        return None
    if call.target in _HIDDEN_VIEWS or is_view(call):
        source = call.args[0]
        return source if isinstance(source, Node) else None
    return None


def in_backward(node: Node) -> bool:
    """Whether AOTAutograd tags ``node`` as part of the backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def producer(node: Node) -> Node:
    """Return the call that computed the values of ``node``, before views and casts; for a cast input, the cast."""
    node = owner(node)
    if node.target in CASTS and isinstance(node.args[0], Node):
        source = producer(node.args[0])
        return node if source.op in ("placeholder", "get_attr") else source
    return call_of(node)


def call_of(node: Node) -> Node:
    """Return the call whose result, or one of whose results, ``node`` is."""
    call = node.args[0] if node.target is operator.getitem else node
    assert isinstance(call, Node)
    return call


def readers(node: Node) -> Iterator[Node]:
    """Yield the forward's calls that read ``node``, directly or through views, copies and casts."""
    for user in node.users:
        if user.op == "output" or in_backward(user):
            continue
        yield from readers(user) if moves_only(user) else (user,)


def moves_only(call: Node) -> bool:
    """Whether ``call`` is a view, a copy or a cast."""
    return view_base(call) is not None or call.target in (*CASTS, *_COPIES)


def keep_decision(memory: Memory, context: CastContext) -> KeepDecision:
    """Return the rule for ``memory``. A rule can name ops as they are in the graph, or as before decomposition."""
    call = producer(memory.owner)
    if not isinstance(call.target, OpOverload):
        return KeepDecision(None, f"{op_name(call)} computed it, and no rule can name that op")
    if is_kept_exactly(call):
        return KeepDecision(None, "it is a gradient that the forward computes")
    value = tensor_value(memory.owner)
    assert value is not None
    calls = list(readers(memory.owner))
    names = dict.fromkeys(name for reader in calls for name in names_of(reader))
    site = replace(with_result(site_of(call, KEPT), value), readers=tuple(names))
    rulings = [context.policy.ruling(replace(site, op=name)) for name in names_of(call)]
    order = {id(rule): at for at, rule in enumerate(context.policy.rules)}
    rule = max(
        (r.rule for r in rulings if isinstance(r.rule, KeepRule)), key=lambda rule: order[id(rule)], default=None
    )
    if rule is None:
        return KeepDecision(None, rulings[0].unknown or "no rule is for it")
    if marked_lower(call, context) is None:
        return KeepDecision(rule, "autocast is off where it is computed")
    if any(_WITHOUT_GRADIENT in reader.meta for reader in calls):
        return KeepDecision(rule, "a table is computed from it, which may be sensitive to it, like a cosine")
    return KeepDecision(rule, _jump_reason(memory, rule))


def _jump_reason(memory: Memory, rule: KeepRule) -> str:
    """Return why rounding ``memory`` would change what the backward recomputes from it, "" if it would not."""
    jumps = [view.meta[JUMP] for view in memory.views if JUMP in view.meta] if rule.keep in _LOSSY else []
    jump = next((jump for jump in jumps if not jump.at_zero or rule.keep not in _WITH_SIGN), None)
    return "" if jump is None else f"the backward recomputes {jump.op} from it, where a rounded value may jump"


def names_of(node: Node) -> tuple[str, ...]:
    """Return the name of the node's op, and of the op that it was decomposed from, if any."""
    before = node.meta.get("original_aten")
    names = [op_name(node)]
    if isinstance(before, OpOverload):
        names.append(f"{before.namespace}::{before._opname}.{before._overloadname}")
    return tuple(dict.fromkeys(names))


def stored_bytes(values: Sequence[object]) -> int | None:
    """Return the bytes of the tensors' storages, each once, for this compilation's sizes; None if one is unknown."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return None
    sizes = {tensor.untyped_storage()._cdata: hint(tensor.untyped_storage().nbytes()) for tensor in tensors}
    return total(sizes.values())


def _storage(node: object) -> int | None:
    value = tensor_value(node)
    return None if value is None or value.layout is not torch.strided else value.untyped_storage()._cdata


def _is_number(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))
