"""What each category of rule does to one call: a table from autocast's category to an edit.

The semantics are those of ``at::autocast`` (aten/src/ATen/autocast_mode.h), verified by running it. An edit holds the
new dtype of each floating-point input, and new values of keyword arguments; it depends only on the nodes' fake values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils import _pytree as pytree

from fxamp.graph import argument, arguments, tensor_value, writes
from fxamp.passes.base import CastContext
from fxamp.policy import CastRule, Category, Rule

#: Key of ``node.meta`` of a call in a decomposition whose argument ``dtype`` is its input's dtype, whatever that is.
INPUT_DTYPE = "fxamp_input_dtype"


@dataclass(frozen=True)
class Edit:
    """Inputs to cast (node to dtype), keyword arguments to set, and the overload to call instead."""

    casts: Mapping[Node, torch.dtype] = field(default_factory=dict)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: OpOverload | None = None


def edit_for(rule: Rule, node: Node, lower: torch.dtype, context: CastContext) -> Edit:
    """Return the edit that ``rule`` asks for at ``node``, given the current values of its inputs."""
    if not isinstance(rule, CastRule):  # a loss in chunks
        return _cast_all(node, torch.float32, context)
    if rule.cast in _EDITS:
        return _EDITS[rule.cast](node, lower, context)
    dtype = torch.float32 if rule.cast is Category.FP32 else lower
    return _cast_all(node, dtype, context, _own_dtypes(rule, node, lower))


def _cast_all(
    node: Node, dtype: torch.dtype, context: CastContext, own: Mapping[Node, torch.dtype | None] | None = None
) -> Edit:
    """Cast every eligible input to ``dtype``, or to its dtype in ``own``, where None means no cast."""
    targets = writes(node)  # a write to a cast copy would be lost
    casts = {}
    for source in node.all_input_nodes:
        value, target_dtype = tensor_value(source), (own or {}).get(source, dtype)
        if source in targets or target_dtype is None or value is None:
            continue
        if context.eligible(value) and value.dtype != target_dtype:
            casts[source] = target_dtype
    return Edit(casts)


def _own_dtypes(rule: CastRule, node: Node, lower: torch.dtype) -> dict[Node, torch.dtype | None]:
    """Return the dtypes that ``rule.inputs`` gives single inputs; the last named argument wins for one tensor."""
    meaning = {"lower_precision_fp": lower, "fp32": torch.float32, "follow": None}
    named = [(pytree.tree_leaves(argument(node, name)), meaning[dtype]) for name, dtype in rule.inputs]
    return {leaf: dtype for leaves, dtype in named for leaf in leaves if isinstance(leaf, Node)}


def _first_tensor(node: Node) -> torch.Tensor | None:
    first = node.args[0] if node.args else None
    return tensor_value(first[0] if isinstance(first, (list, tuple)) and first else first)


def _set_dtype(node: Node, lower: torch.dtype, context: CastContext) -> Edit:
    """The op accumulates in and returns float32; its input is not cast. An explicit dtype wins.

    If that is :data:`INPUT_DTYPE`, and the input is wider now, the op computes in the wider one.
    """
    first, dtype = _first_tensor(node), argument(node, "dtype")
    if first is not None and node.meta.get(INPUT_DTYPE):
        wider = torch.promote_types(first.dtype, dtype)
        return Edit(kwargs={} if wider == dtype else {"dtype": wider})
    if not context.eligible(first) or dtype is not None:
        return Edit()
    return Edit(kwargs={"dtype": torch.float32})


def _append_dtype(node: Node, lower: torch.dtype, context: CastContext) -> Edit:
    """Call the overload that takes a dtype: float32, or the dtype of an ineligible input."""
    target = node.target
    assert isinstance(target, OpOverload)
    first = _first_tensor(node)
    with_dtype = _WITH_DTYPE.get(target._overloadname)
    if with_dtype is None:
        return Edit()
    overload = getattr(target.overloadpacket, with_dtype)
    dtype = torch.float32 if context.eligible(first) or first is None else first.dtype
    return Edit(kwargs={"dtype": dtype}, target=overload)


#: Overloads of ``aten::norm``, and for each the overload that takes a dtype.
_WITH_DTYPE = {
    "Scalar": "ScalarOpt_dtype",
    "ScalarOpt_dim": "ScalarOpt_dim_dtype",
    "names_ScalarOpt_dim": "names_ScalarOpt_dim_dtype",
}


def _promote(node: Node, lower: torch.dtype, context: CastContext) -> Edit:
    """Cast all inputs to their widest dtype; a 16-bit dtype other than the policy's counts as float32.

    Optional tensors (``bilinear``'s bias) are cast too, but do not count for the widest dtype.
    """
    assert isinstance(node.target, OpOverload)
    operands = [arg for parameter, arg in arguments(node) if not isinstance(parameter.type, torch.OptionalType)]
    values = [tensor_value(leaf) for leaf in pytree.tree_leaves(operands)]
    dtypes = {value.dtype for value in values if context.eligible(value) and value is not None}
    return _cast_all(node, lower if dtypes <= {lower} else torch.float32, context)


_EDITS: dict[Category, Callable[[Node, torch.dtype, CastContext], Edit]] = {
    Category.FP32_SET_OPT_DTYPE: _set_dtype,
    Category.FP32_APPEND_DTYPE: _append_dtype,
    Category.PROMOTE: _promote,
}
