"""simplify-masks: remove attention masks that are the same in every step.

transformers computes its masks from sizes alone while torch.compile traces, where eager mode passes none or
``is_causal``. Such a mask rules out flash attention, and with a stride of zero it rules out the memory-efficient kernel
too, so that attention runs as float32 products. A mask that no input decides is evaluated while the graph is compiled:

1. One that masks nothing is removed.
2. One that is causal becomes ``is_causal=True``: of a square of scores, it keeps those on and below the diagonal.

Both are what ``scaled_dot_product_attention`` documents. Other kernels round differently, so the pass runs only where
the context allows any kernel.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from fxamp.graph import all_graphs, argument, base_name, is_pure, set_argument, tensor_value
from fxamp.graph.higher_order_ops import bodies
from fxamp.graph.scope import Scope
from fxamp.passes.base import CastContext, Pass, Result, broken_by
from fxamp.torch_private import without_fake_mode

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default

#: The most elements of a value on the way to a mask: 8192 queries and as many keys.
MOST_ELEMENTS = 2**26

#: Ops whose results hold what the memory held before.
_UNINITIALIZED = ("aten::empty", "aten::new_empty")


@dataclass(frozen=True)
class SimplifyMasks(Pass[CastContext]):
    """Requires values on all nodes; ensures that no call has both a mask and ``is_causal``."""

    name = "simplify-masks"

    def run(self, gm: GraphModule, context: CastContext) -> Result:
        calls = Counter(body.module for graph in all_graphs(gm) for node in graph.graph.nodes for body in bodies(node))
        simplified = _simplify_in(gm, Scope(gm.graph), calls) if context.any_attention_kernel else 0
        return Result(simplified, {"masks": simplified})

    def ensures(self, gm: GraphModule, context: CastContext) -> str | None:
        both = (call for graph in all_graphs(gm) for call in _masked(graph) if argument(call, "is_causal"))
        return broken_by("attention with a mask and is_causal", both)


def _simplify_in(gm: GraphModule, scope: Scope, calls: Counter[GraphModule]) -> int:
    """Simplify the masks of one graph, whose scope is ``scope``, and of its bodies; return for how many calls.

    ``calls``: how many calls have each body. What several calls bind to an input of a body may differ.
    """
    simplified = 0
    masked = _masked(gm)
    for mask in dict.fromkeys(argument(call, "attn_mask") for call in masked):
        causal = _is_causal(mask, scope)
        if causal is not None:
            simplified += sum(_simplify(call, causal) for call in masked if argument(call, "attn_mask") is mask)
    if simplified:
        gm.graph.eliminate_dead_code(lambda node: not is_pure(node))
    for node in list(gm.graph.nodes):
        for body in bodies(node):
            inside = scope.inside(node, body) if calls[body.module] == 1 else Scope(body.module.graph)
            simplified += _simplify_in(body.module, inside, calls)
    return simplified


def _masked(gm: GraphModule) -> list[Node]:
    calls = gm.graph.find_nodes(op="call_function", target=ATTENTION)
    return [call for call in calls if argument(call, "attn_mask") is not None]


def _simplify(call: Node, causal: bool) -> bool:
    """Remove the mask of a call, which is ``causal`` or masks nothing; return whether that is possible."""
    if argument(call, "is_causal"):
        return False
    if causal:
        query, key, mask = (tensor_value(argument(call, name)) for name in ("query", "key", "attn_mask"))
        if query is None or key is None or mask is None or mask.shape[-2:] != (query.shape[-2], key.shape[-2]):
            return False
        set_argument(call, "is_causal", True)
    set_argument(call, "attn_mask", None)
    return True


def _is_causal(mask: Node, scope: Scope) -> bool | None:
    """Return whether a mask is causal, False if it masks nothing; None for other masks, and if inputs may decide."""
    calls: dict[Node, Any] = {}
    if not _collect(mask, scope, calls):
        return None
    with without_fake_mode(), torch.no_grad():
        value = _evaluated(calls)
        keeps = value if value.dtype is torch.bool else value == 0
        if keeps is not value and not (keeps | (value == -torch.inf)).all():
            return None
        if keeps.all():
            return False
        if keeps.dim() < 2:
            return None
        rows, columns = keeps.shape[-2:]
        square = torch.ones(rows, columns, dtype=torch.bool, device="cpu").tril()
        return True if rows == columns and torch.equal(keeps, square.expand_as(keeps)) else None


def _collect(node: Node, scope: Scope, calls: dict[Node, Any]) -> bool:
    """Add to ``calls`` those that compute ``node``, in order; return False if not only constants decide its value.

    An input of a body comes with what it is bound to, a call with None.
    """
    if node in calls:
        return True
    operand = scope.bound.get(node)
    if isinstance(operand, Node) and scope.outer is not None:
        constant = _collect(operand, scope.outer, calls)
    else:
        constant = _is_constant(node) and all(_collect(source, scope, calls) for source in node.all_input_nodes)
    calls[node] = operand
    return constant and not scope.writes_to(node)


def _is_constant(node: Node) -> bool:
    """Whether the node computes a value of fixed size from its operands alone."""
    value = node.meta.get("val")
    if not is_pure(node) or not base_name(node).startswith("aten::") or base_name(node).startswith(_UNINITIALIZED):
        return False
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        return False
    return value.numel() <= MOST_ELEMENTS


def _evaluated(calls: dict[Node, Any]) -> Tensor:
    """Run the calls on the CPU and return the value of the last one."""
    values: dict[Node, Any] = {}

    def real(part: Any) -> Any:
        if isinstance(part, Node):
            return values[part]
        return torch.device("cpu") if isinstance(part, torch.device) else part

    for call, operand in calls.items():
        if operand is not None:
            values[call] = values[operand]
            continue
        assert callable(call.target)
        values[call] = call.target(*map_aggregate(call.args, real), **map_aggregate(call.kwargs, real))
    result: Tensor = values[next(reversed(calls))]
    return result
