"""measure-results: return the largest magnitude of each floating value of a captured graph as one more output.

1. Every floating result, input and constant is measured right after it is made, outside of autograd, as
   :mod:`fxamp.passes.shared.magnitudes` says. What a call writes in place is its result.
2. Floating outputs are measured although they may be part of what is, unless they are the whole of it.
3. The new last output is a 1-dim tensor with one number for each; ``output.meta[MEASURED]`` names their nodes. A graph
   without floating values does not change.
4. The bodies of checkpoints return theirs to the graph outside, named ``"body/node"``. Other higher-order ops are
   measured by their results. Inside of torch.func transforms nothing is measured: values there have other shapes.
5. Each call is annotated with its name: AOTAutograd copies annotations to the nodes that it traces, also to those of
   the backward.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter, all_graphs, graph_output, nesting_change, tensor_value
from fxamp.graph.higher_order import bodies
from fxamp.passes.base import Context, Pass, Result
from fxamp.passes.shared.magnitudes import MEASURED, OP, MagnitudeWriter, is_measured, measured_results

_CHECKPOINTS = (torch.ops.higher_order.tag_activation_checkpoint, torch.ops.higher_order.wrap)


@dataclass(frozen=True)
class MeasureResults(Pass[Context]):
    """Requires values on all nodes; ensures rules 1 to 5."""

    name = "measure-results"

    def run(self, gm: GraphModule, context: Context) -> Result:
        if MEASURED in graph_output(gm.graph).meta:
            return Result(0)
        _annotate(gm)
        names = _measure(gm, context)
        return Result(len(names), {"measured": len(names)})

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        output = graph_output(gm.graph)
        names = output.meta.get(MEASURED)
        if names is None:
            return "nothing says what is measured"
        value = tensor_value(output.args[0][-1]) if names else None  # type: ignore[index]
        if names and (value is None or tuple(value.shape) != (len(names),)):
            return f"{len(names)} values are measured, but the last output is {value}"
        return None


def _annotate(gm: GraphModule) -> None:
    for graph in all_graphs(gm):
        for node in graph.graph.nodes:
            if node.op.startswith("call"):
                node.meta["custom"] = {**node.meta.get("custom", {}), OP: node.name}


def _measure(gm: GraphModule, context: Context, body: bool = False) -> list[str]:
    """Measure one graph and what is in it; return the names, and add the numbers to its outputs.

    ``body``: it is a checkpoint's, and what it reads is measured outside.
    """
    writer = MagnitudeWriter(GraphWriter(gm.graph, context.mode), traced=False)
    names: list[str] = []
    parts: list[Node] = []
    depth, first = 0, next(node for node in gm.graph.nodes if node.op != "placeholder")
    results = measured_results(graph_output(gm.graph))
    made = {node for node in gm.graph.nodes if is_measured(node) or node in results}
    known = {node for node in gm.graph.nodes if (node.op == "placeholder" and body) or _of_checkpoint(node)}
    for node in list(gm.graph.nodes):
        depth += nesting_change(node.target)
        if depth:
            continue
        with gm.graph.inserting_before(first if node.op == "placeholder" else node.next):
            if node.target in _CHECKPOINTS:
                inner, numbers = _measure_bodies(node, writer.call, context)
                names += inner
                parts += numbers
            elif node in made and node not in known:
                names.append(node.name)
                parts.append(writer.magnitude(node))
    writer.add_output(gm, names, parts)
    return names


def _of_checkpoint(node: Node) -> bool:
    """Whether ``node`` is a result of a checkpoint, in which it is measured."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and source.target in _CHECKPOINTS


def _measure_bodies(node: Node, call: Callable[..., Node], context: Context) -> tuple[list[str], list[Node]]:
    """Measure what is in a checkpoint ``node``; return the names, and the numbers that it returns besides."""
    names: list[str] = []
    numbers: list[Node] = []
    for body in bodies(node):
        inner = _measure(body.module, context, body=True)
        if inner:
            names += [f"{body.attribute.target}/{name}" for name in inner]
            results: Any = graph_output(body.module.graph).args[0]
            number = results[-1]
            node.meta["val"] = (*node.meta["val"], number.meta["val"])
            numbers.append(call(operator.getitem, node, len(node.meta["val"]) - 1))
    return names, numbers
