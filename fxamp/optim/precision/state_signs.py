"""Find the states that a step never makes negative, and those of which it takes the root of a difference.

The 8-bit codes of the former need no sign. The latter are not rounded: centered RMSprop takes the root of a mean of
squares minus the square of a mean, which rounding makes negative.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxamp.graph import argument
from fxamp.graph.depth_first import depth_first
from fxamp.passes.step.pack_state import ROLE

aten, prims = torch.ops.aten, torch.ops.prims

_SQUARES = frozenset({aten.mul.Tensor, aten.square.default})
_ALWAYS = frozenset({aten.abs.default, aten.exp.default, aten.sqrt.default, aten.square.default})
_IF_ALL = frozenset(
    {aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.minimum.default, aten.clone.default, aten.detach.default}
    | {aten._to_copy.default, prims.convert_element_type.default, aten.reciprocal.default, aten.mul.Scalar}
    | {aten.full.default, aten.add.Scalar, aten.div.Scalar}
)
_IF_ANY = frozenset({aten.maximum.default, aten.clamp_min.default})
_ROOTS = frozenset({aten.log.default, aten.rsqrt.default, aten.sqrt.default})


@dataclass(frozen=True)
class StateSigns:
    """Roles of states of a step: ``unsigned`` stay non-negative if they are; ``under_roots`` must not be rounded.

    The root of what depends on the latter would be NaN: a difference may be negative once they are rounded.
    """

    unsigned: frozenset[str]
    under_roots: frozenset[str]


def state_signs(gm: GraphModule) -> StateSigns:
    """Return the signs of the states in ``gm``, a step of one parameter whose settings are constants.

    The result also holds for other settings of the same signs.
    """
    unsigned = _never_negative(gm)
    return StateSigns(frozenset(str(node.meta[ROLE]) for node in unsigned), _under_roots(gm, _known(gm, unsigned)))


def _under_roots(gm: GraphModule, known: set[Node]) -> frozenset[str]:
    read = [node.args[0] for node in gm.graph.nodes if _is_root(node) and node.args[0] not in known]
    sources = depth_first(read, lambda node: node.all_input_nodes)
    found = {str(node.meta.get(ROLE)) for node in sources if node.op == "placeholder"}
    return frozenset(found - {"gradient", "parameter"})


def _is_root(node: Node) -> bool:
    """Whether ``node`` is NaN where what it reads is negative."""
    if node.target is aten.pow.Tensor_Scalar:
        power = node.args[1]
        return isinstance(power, float) and not power.is_integer()
    return node.target in _ROOTS


def _never_negative(gm: GraphModule) -> set[Node]:
    inputs = gm.graph.find_nodes(op="placeholder")
    copies = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    written = {node.args[0]: node.args[1] for node in copies}
    assumed = {node for node in inputs if node in written and node.meta.get(ROLE) not in ("parameter", "gradient")}
    while True:
        known = _known(gm, assumed)
        remaining = {node for node in assumed if written[node] in known}
        if remaining == assumed:
            return remaining
        assumed = remaining


def _known(gm: GraphModule, assumed: set[Node]) -> set[Node]:
    known = set(assumed)
    for node in gm.graph.nodes:
        if node.op == "call_function" and _holds(node, known):
            known.add(node)
    return known


def _holds(node: Node, known: set[Node]) -> bool:
    def sure(value: Any) -> bool:
        if isinstance(value, Node):
            return value in known
        return not isinstance(value, (int, float)) or value >= 0

    operands = [arg for arg in node.args if isinstance(arg, (Node, int, float))]
    if node.target in _SQUARES and len(operands) == 2 and operands[0] is operands[1]:
        return True
    if node.target in (aten.addcmul.default, aten.addcdiv.default):
        first, second = node.args[1:3]
        product = (node.target is aten.addcmul.default and first is second) or (sure(first) and sure(second))
        return sure(node.args[0]) and product and sure(node.kwargs.get("value", 1))
    if node.target in (aten.lerp.Scalar, aten.lerp.Tensor):
        weight = node.args[2]
        return all(map(sure, node.args[:2])) and isinstance(weight, (int, float)) and 0 <= weight <= 1
    if node.target is aten.clamp.default:
        least, most = (argument(node, name) for name in ("min", "max"))
        return (sure(node.args[0]) or (least is not None and sure(least))) and (most is None or sure(most))
    if node.target is aten.copy.default:
        return sure(node.args[1])
    if node.target is aten.where.self:
        return all(map(sure, node.args[1:]))
    if node.target is aten.pow.Tensor_Scalar:
        return sure(node.args[0]) or node.args[1] in (2, 4)
    if node.target in _ALWAYS:
        return True
    if node.target in _IF_ANY:
        return any(map(sure, operands))
    return node.target in _IF_ALL and all(map(sure, operands)) and sure(node.kwargs.get("alpha", 1))
