"""drop-results: remove the results of a training step that a policy's rules of region "results" name.

1. A rule holds in graphs that return a number, the loss, with gradients on and inputs that need a gradient. Evaluation,
   and graphs that return no loss because other graphs compute it, return everything.
2. The output becomes None; ``output.meta[DROPPED]`` describes it, so that callers get a tensor that raises an error.
3. The conditions refer to the op that computed the result, before views, copies and conversions; ``args`` and
   ``elements`` are those of the kept region.
4. A result stays, and the log says why, if its sizes depend on values, or if code inside the compiled call may read it:
   after a graph break, or in a function that Dynamo skips and that called the graph.
"""

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxamp.graph import (
    describe_source,
    graph_output,
    is_pure,
    module_classes,
    module_path,
    need_gradients,
    op_name,
    tensor_value,
)
from fxamp.graph.aliases import is_view
from fxamp.passes.base import CastContext, Pass, Result
from fxamp.passes.shared.cast_writer import CONVERSIONS, COPIES
from fxamp.passes.shared.sites import site_of, with_result
from fxamp.policy import Rule, Site
from fxamp.policy.model.site import RESULTS
from fxamp.torch_private import size_reader

aten = torch.ops.aten
log = logging.getLogger(__name__)

#: Key of the output node's ``meta``: a tuple of :class:`DroppedResult`.
DROPPED = "fxamp_dropped"


@dataclass(frozen=True)
class DroppedResult:
    """The dropped output at position ``at``. Each of ``sizes`` computes one of its sizes from a run's inputs."""

    at: int
    sizes: tuple[Callable[[Sequence[Any]], int], ...]
    dtype: torch.dtype
    device: torch.device
    why: str


@dataclass(frozen=True)
class DropResults(Pass[CastContext]):
    """Requires a captured graph; ensures rules 1 to 4."""

    name = "drop-results"

    def run(self, gm: GraphModule, context: CastContext) -> Result:
        if not context.policy.has_rules_for(RESULTS) or not torch.is_grad_enabled():
            return Result(0)
        output = graph_output(gm.graph)
        leaves, spec = pytree.tree_flatten(output.args[0])
        inputs = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        if not need_gradients(inputs) or not any(map(_is_number, leaves)):
            return Result(0)
        dropped = []
        for at, leaf in enumerate(leaves):
            rule = _rule(leaf, context)
            result = None if rule is None else _dropped(at, leaf, rule, inputs, context)
            if result is not None:
                dropped.append(result)
                leaves[at] = None
        if dropped:
            output.args = (pytree.tree_unflatten(leaves, spec),)
            output.meta[DROPPED] = (*output.meta.get(DROPPED, ()), *dropped)
            gm.graph.eliminate_dead_code(lambda node: not is_pure(node))
        return Result(len(dropped), {"dropped": len(dropped)})

    def ensures(self, gm: GraphModule, context: CastContext) -> str | None:
        output = graph_output(gm.graph)
        leaves = pytree.tree_leaves(output.args[0])
        places = [result.at for result in output.meta.get(DROPPED, ()) if leaves[result.at] is not None]
        return f"dropped outputs {places} are made" if places else None


def _is_number(leaf: object) -> bool:
    value = tensor_value(leaf)
    return value is not None and value.dim() == 0 and value.is_floating_point()


def _rule(leaf: object, context: CastContext) -> Rule | None:
    """Return the rule that drops an output; None if there is none, or if the graph does not compute it."""
    value = tensor_value(leaf)
    if value is None or not isinstance(leaf, Node):
        return None
    producer = _producer(leaf)
    if producer.op in ("placeholder", "get_attr"):
        return None
    return context.policy.ruling(_site(producer, value)).rule


def _producer(node: Node) -> Node:
    """Return the node that computed ``node``."""
    passes_on = is_view(node) or node.target in CONVERSIONS | COPIES or node.target is operator.getitem
    source = node.args[0] if passes_on else None
    return _producer(source) if isinstance(source, Node) else node


def _site(producer: Node, value: Tensor) -> Site:
    if isinstance(producer.target, OpOverload):
        site = site_of(producer, RESULTS)
    else:
        site = Site(op_name(producer), module_path(producer), module_classes(producer), region=RESULTS)
    return with_result(site, value)


def _dropped(at: int, leaf: Node, rule: Rule, inputs: Sequence[Any], context: CastContext) -> DroppedResult | None:
    value = tensor_value(leaf)
    assert value is not None
    producer = _producer(leaf)
    name = f"the result of {op_name(producer)} at {describe_source(producer)}"
    sizes = [size_reader(size, inputs) for size in value.shape]
    if context.read_inside or None in sizes:
        log.warning("%s is not dropped: %s", name, context.read_inside or "its sizes depend on values")
        return None
    where = f", {rule.origin}" if rule.origin else ""
    reason = (
        f"{name} is not computed in training: policy {context.policy.name!r} drops it by rule {rule.id!r}{where}. To "
        "read it, remove the rule or narrow its conditions; under torch.no_grad() it is computed"
    )
    return DroppedResult(at, tuple(filter(None, sizes)), value.dtype, value.device, reason)
