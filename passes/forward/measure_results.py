"""measure-results: return the largest magnitude of each floating value of a captured graph as one more output.

1. Every floating result, input and constant that :mod:`fxamp.passes.shared.magnitudes` selects is measured, outside of
   autograd and in the shape in which it is read. The tensor that a call writes to in place counts as its result.
2. A floating output that is a view of a measured value is measured too, unless it holds the whole value. An input that
   the graph may write to is measured at the end too, under the name that ``magnitudes.name_after`` gives.
3. The new last output is a 1-dim tensor with one number for each measured value; ``output.meta[MEASURED]`` names their
   nodes. A graph without floating values does not change.
4. A value is measured right after its first reader (``magnitude_writer.place_of``). If the graph may write to it, it is
   measured as soon as it exists, an input at the start of the graph.
5. The bodies of checkpoints, the branches of conds and the forwards of Functions return their numbers to the outer
   graph, under names ``"body/node"``; the numbers of a branch that does not run are zeros. Only the results of other
   higher-order ops are measured. Nothing is measured inside torch.func transforms, where values have other shapes; a
   value that leaves the outermost one is measured after it.
   With ``backwards``, for eager runs, the backwards of Functions return their numbers as one more result; otherwise
   AOTAutograd traces them.
6. Calls that no output and no effect depends on are not measured: a compiler removes them.
7. Each call is annotated with its name. AOTAutograd copies annotations to the nodes that it traces, including those of
   the backward.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxamp.graph import (
    AliasSets,
    GraphWriter,
    fake_tensors,
    first_computation,
    graph_output,
    is_pure,
    nesting_change,
    returned,
    subgraphs,
    tensor_value,
)
from fxamp.graph.higher_order_ops import AutogradFunction, Body, autograd_function, bodies
from fxamp.passes.base import Context, Pass, Result
from fxamp.passes.shared.magnitude_writer import MagnitudeWriter, first_reader, in_shape_read, place_of
from fxamp.passes.shared.magnitudes import (
    MEASURED,
    OP,
    can_be_measured,
    is_known,
    is_measured,
    measured_results,
    name_after,
)

aten = torch.ops.aten

_CHECKPOINTS = (torch.ops.higher_order.tag_activation_checkpoint, torch.ops.higher_order.wrap)
_COND = torch.ops.higher_order.cond


@dataclass(frozen=True)
class MeasureResults(Pass[Context]):
    """Requires values on all nodes; ensures rules 1 to 7."""

    name = "measure-results"

    backwards: bool = False

    def run(self, gm: GraphModule, context: Context) -> Result:
        if MEASURED in graph_output(gm.graph).meta:
            return Result(0)
        _annotate(gm)
        names = _measure(gm, context, self.backwards)
        return Result(len(names), {"measured": len(names)})

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        names = graph_output(gm.graph).meta.get(MEASURED)
        if names is None:
            return "nothing says what is measured"
        value = tensor_value(returned(gm.graph)[-1]) if names else None
        if names and (value is None or tuple(value.shape) != (len(names),)):
            return f"{len(names)} values are measured, but the last output is {value}"
        return None


def _annotate(gm: GraphModule, prefix: str = "", whole: str = "") -> None:
    """Annotate each call with its name; calls in a body that is not measured get the name of the op that holds it."""
    read = _read(gm)
    for node in gm.graph.nodes:
        if node.op.startswith("call"):
            name = whole or prefix + node.name
            node.meta["custom"] = {**node.meta.get("custom", {}), OP: name}
            measured = not whole and node in read and (_measured_bodies(node) or autograd_function(node) is not None)
            for body, inner in subgraphs(node):
                _annotate(inner, f"{prefix}{body.target}/", "" if measured else name)


def _measure(gm: GraphModule, context: Context, backwards: bool, body: bool = False) -> list[str]:
    """Measure one graph and its bodies; add the numbers to its outputs, and return the names of the measured nodes.

    ``body``: the graph is a body of another one, which measures its inputs.
    """
    writer = MagnitudeWriter(GraphWriter(gm.graph, context.mode), traced=False)
    names: list[str] = []
    parts: list[Node] = []
    places, read, output = _places(gm), _read(gm), graph_output(gm.graph)
    results = measured_results(output)
    inside = {node for node in gm.graph.nodes if (node.op == "placeholder" and body) or _is_measured_inside(node)}
    known = set(inside)
    written = [] if body else _written(gm)
    for node in list(gm.graph.nodes):
        if node not in places or node not in read:
            continue
        source, place = places[node]
        with gm.graph.inserting_before(place):
            if _measured_bodies(node):
                inner, numbers = _measure_bodies(node, writer.call, context, backwards)
                names += inner
                parts += numbers
            elif node not in inside and (node in results or is_measured(node, known)):
                known.add(node)
                names.append(node.name)
                parts.append(writer.magnitude(source))
            elif is_known(node, known):
                known.add(node)
    with gm.graph.inserting_before(output):
        names += map(name_after, written)
        parts += map(writer.magnitude, written)
    writer.add_output(gm, names, parts)
    return names


def _written(gm: GraphModule) -> list[Node]:
    """Return the floating inputs that the graph may write to."""
    aliases = AliasSets(gm.graph)
    return [node for node in gm.graph.find_nodes(op="placeholder") if can_be_measured(node) and aliases.mutated(node)]


def _places(gm: GraphModule) -> dict[Node, tuple[Node, Node]]:
    """Return for each node what to measure, itself or a view, and the node before which to measure it (1, 4, 5)."""
    first = first_computation(gm.graph)
    depth, outside, inside, aliases = 0, set[Node](), list[Node](), AliasSets(gm.graph)
    places: dict[Node, tuple[Node, Node]] = {}
    for node in gm.graph.nodes:
        depth += nesting_change(node.target)
        if depth:
            inside.append(node)
            continue
        outside.add(node)
        places |= {left: (left, node.next) for left in inside if any(user > node for user in left.users)}
        inside.clear()
    for node in outside:
        source, place = node, first if node.op == "placeholder" else node.next
        if not aliases.mutated(node):
            if node.op.startswith("call"):
                view = in_shape_read(node)
                source = view if view in outside else node
                place = source.next
            place = place_of(source) if first_reader(source) in outside else place
        places[node] = source, place
    return places


def _read(gm: GraphModule) -> set[Node]:
    """Return the nodes that an output or an effect depends on, and all inputs (6)."""
    read: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        removed = is_pure(node) or node.target in (*_CHECKPOINTS, _COND)
        if not removed or not read.isdisjoint(node.users):
            read.add(node)
    return read


def _measured_bodies(node: Node) -> list[Body]:
    """Return the bodies whose values are measured inside: of a checkpoint, a cond, or the forward of a Function.

    Not for a Function that writes to an input: if that is a view, autograd requires it to be the only result.
    """
    function = autograd_function(node)
    if function is not None:
        if node.kwargs.get("dirty_idx"):
            return []
        results, _ = returned(function.forward.module.graph)
        return [function.forward] if isinstance(results, (tuple, list)) else []
    return bodies(node) if node.target in (*_CHECKPOINTS, _COND) else []


def _is_measured_inside(node: Node) -> bool:
    """Whether ``node`` is a result of a checkpoint or of a Function, in which it is measured."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and source.target is not _COND and bool(_measured_bodies(source))


def _measure_bodies(
    node: Node, call: Callable[..., Node], context: Context, backwards: bool
) -> tuple[list[str], list[Node]]:
    """Measure the bodies of ``node``; return the names of the measured nodes, and the nodes of their numbers."""
    function = autograd_function(node)
    if function is not None and backwards:
        _measure(function.backward.module, context, backwards, body=True)
    inner = [(body, _measure(body.module, context, backwards, body=True)) for body in _measured_bodies(node)]
    names = [f"{body.attribute.target}/{name}" for body, own in inner for name in own]
    if not names:
        return [], []
    if function is not None:
        value = _return_constant(node, function)
    else:
        before = 0
        for body, own in inner:
            value = _pad(body.module, context, before, len(own), len(names))
            before += len(own)
    node.meta["val"] = (*node.meta["val"], value)
    number = call(operator.getitem, node, len(node.meta["val"]) - 1)
    return names, [call(aten.detach.default, number) if node.target is _COND else number]


def _return_constant(node: Node, function: AutogradFunction) -> Any:
    """Add the numbers of a Function's forward to the results of ``node``, without gradient; return their fake value."""
    results, saved, numbers = returned(function.forward.module.graph)
    graph_output(function.forward.module.graph).args = (((*results, numbers), saved),)
    constant: Any = node.kwargs["non_differentiable_idx"]
    node.kwargs = {**node.kwargs, "non_differentiable_idx": [*constant, len(results)]}
    graph = function.backward.module.graph
    with graph.inserting_before([*graph.find_nodes(op="placeholder"), graph_output(graph)][len(results)]):
        graph.placeholder("numbers").meta["val"] = numbers.meta["val"]
    return numbers.meta["val"]


def _pad(gm: GraphModule, context: Context, before: int, own: int, whole: int) -> Any:
    """Let the branch ``gm`` return ``whole`` numbers: zeros around its ``own``, which come after ``before`` others.

    The branches of a cond return the same number of values. Return the fake value of what it returns.
    """
    output = graph_output(gm.graph)
    results = returned(gm.graph)
    if own == whole:
        return results[-1].meta["val"]
    writer = GraphWriter(gm.graph, context.mode)
    with gm.graph.inserting_before(output):
        device = next(value.device for node in gm.graph.nodes for value in fake_tensors(node.meta.get("val")))
        zeros = [
            writer.call(aten.full.default, [count], 0.0, dtype=torch.float64, device=device)
            for count in (before, whole - before - own)
        ]
        numbers = [writer.in_dtype(results[-1], torch.float64)] if own else []
        padded = writer.call(aten.cat.default, [zeros[0], *numbers, zeros[1]])
    output.args = ((*(results[:-1] if own else results), padded),)
    return padded.meta["val"]
