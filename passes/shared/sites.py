"""Describe a node's call by the plain values that a policy's conditions test.

Arguments have the names and defaults of the op's schema; tensors have their captured dtypes. A symbolic number stays
symbolic: a condition on its value could hold for one call of a compiled graph and fail for another.
"""

from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from fxamp.graph import arguments, base_name, module_classes, module_path, op_name
from fxamp.graph.aliases import is_view
from fxamp.policy import Policy, Ruling, Site, Symbol, TensorFacts
from fxamp.policy.model.op_names import aten_ops
from fxamp.policy.model.site import RESULT, Number, Value, product
from fxamp.torch_private import hint

#: Ops that copy or convert values and compute nothing.
MOVES = aten_ops("_to_copy alias clone contiguous detach lift_fresh to type_as") | {
    "prims::convert_element_type",
    "prims::device_put",
}

#: Ops that combine elements along dimensions, in addition to those that torch tags as reductions.
_REDUCES = aten_ops("""
    _fused_rms_norm _log_softmax _softmax cumprod cumsum dot layer_norm linalg_vector_norm log_softmax logcumsumexp
    logsumexp mean nanmean nansum native_layer_norm norm prod rms_norm softmax std std_mean sum var var_mean vdot
""")


def site_of(node: Node, region: str = "forward", within: Node | None = None) -> Site:
    """Return the site of a call of an ATen overload or custom op; ``within``: the node whose module applies."""
    target = node.target
    assert isinstance(target, OpOverload)
    place = within or node
    args = {argument.name: _value(value) for argument, value in arguments(node)}
    return Site(
        op_name(node),
        module_path(place),
        module_classes(place),
        args,
        region,
        _reduces(node, args),
        computes=computes(node, args.get("dtype")),
    )


def with_result(site: Site, value: torch.Tensor) -> Site:
    """Return the site with what conditions can test of the call's result, for regions of rules on results."""
    return replace(site, args={**site.args, RESULT: facts_of(value)}, computes=True, elements=hint(value.numel()))


def ruling_on(node: Node, policy: Policy, region: str = "forward", within: Node | None = None) -> Ruling:
    """Return the policy's ruling for a call at :func:`site_of`, which few policies have to know."""
    return policy.plain_ruling(op_name(node), region) or policy.ruling(site_of(node, region, within))


def computes(node: Node, dtype: object) -> bool:
    """Whether a call does more than view, copy or convert values, and does not name its dtype itself."""
    return base_name(node) not in MOVES and not is_view(node) and dtype is None


def facts_of(tensor: torch.Tensor) -> TensorFacts:
    """Return the properties of a tensor that conditions can test."""
    return TensorFacts(str(tensor.dtype).removeprefix("torch."), tuple(map(_number, tensor.shape)))


def _value(value: Any) -> Value:
    if isinstance(value, Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        return facts_of(value)
    if isinstance(value, (list, tuple)):
        return tuple(_value(item) for item in value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _number(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value).removeprefix("torch.")


def _number(number: int | torch.SymInt | torch.SymFloat | torch.SymBool) -> Number:
    return number if isinstance(number, int) else Symbol(str(number))


def _reduces(node: Node, args: dict[str, Value]) -> Number | None:
    """Return how many elements of the first tensor are combined into one; None if the op is not a reduction."""
    assert isinstance(node.target, OpOverload)
    if base_name(node) not in _REDUCES and torch.Tag.reduction not in node.target.tags:
        return None
    first = next((value for value in args.values() if isinstance(value, TensorFacts)), None)
    if first is None or first.shape is None:
        return None
    if isinstance(normalized := args.get("normalized_shape"), tuple):
        return product(tuple(size for size in normalized if isinstance(size, (int, Symbol))))
    dims = args.get("dim")
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, tuple) or not dims or not first.shape:
        return first.size
    return product(tuple(first.shape[dim] for dim in dims if isinstance(dim, int)))
