"""Measure the backward of a graph that runs eagerly: the gradients that each autograd node returns.

There is no graph of such a backward. So each op of the forward marks the autograd nodes of its results. After a
forward, the nodes between the graph's results and its inputs get hooks, and form a flow with one number for each node
and for each gradient that enters. The backward of a Function is a graph, which is measured like others; its values come
before its node.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge as gradient_edge
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxamp.graph import dtype_name, graph_output, inner_tensors
from fxamp.graph.higher_order_ops import autograd_function, bodies
from fxamp.graph_text import Entry, Listing
from fxamp.graph_text.model import TensorType
from fxamp.nonfinite.flow import Flow, Kind, Value
from fxamp.passes.shared.magnitudes import MEASURED, OP
from fxamp.torch_private import Node, after_backward, grad_fn, gradient_dtypes, inner_nodes, made_before, untraced

#: Takes the numbers of a backward.
Take = Callable[[Flow, Tensor], None]

#: The limit of all values: the largest magnitude shows whether a gradient is finite, whatever its dtype.
_LIMIT = torch.finfo(torch.float64).max


@dataclass
class _Functions:
    """The backwards of a graph's Functions, by the Function's node: their flows, and the last run's numbers."""

    flows: Mapping[str, Flow]
    numbers: dict[str, Tensor] = field(default_factory=dict)

    def note_in(self, name: str, gm: GraphModule) -> None:
        """Let ``gm``, the backward of the Function's node ``name``, note its numbers instead of returning them."""

        def note(numbers: Tensor) -> None:
            self.numbers[name] = numbers.detach()

        output = graph_output(gm.graph)
        if not output.meta[MEASURED]:
            return
        results: Any = output.args[0]
        output.args = (results[:-1],)
        with gm.graph.inserting_before(output):
            gm.graph.call_function(note, (results[-1],))
        gm.recompile()


def watch_backward(run: Callable[..., Any], gm: GraphModule, forward: Flow) -> Callable[[Take, Sequence[Any]], Any]:
    """Return ``run``, which runs ``gm`` eagerly, with each run's backward measured.

    The returned callable takes a function that receives the numbers of the backward, and the arguments of the run.
    ``forward``: the flow of ``gm``, with those of the backwards of its Functions.
    """
    functions = _Functions(forward.functions)
    _mark_ops(gm, functions)
    flows: dict[tuple[Value, ...], Flow] = {}

    def call(take: Take, args: Sequence[Any]) -> Any:
        before = {
            grad_fn(value) or gradient_edge(value).node: at for at, value in enumerate(args) if _has_gradient(value)
        }
        results = run(*args)
        if torch.is_grad_enabled():
            roots = list(dict.fromkeys(grad_nodes((results, args))))
            _watch(roots, before, flows, functions, take)
        return results

    return call


def _mark_ops(gm: GraphModule, functions: _Functions) -> None:
    """Let each op of ``gm``, and of the bodies of its checkpoints and conds, mark the autograd nodes of its results."""
    for node in list(gm.graph.nodes):
        name = node.meta.get("custom", {}).get(OP)
        if name is not None and node.op.startswith("call"):
            with gm.graph.inserting_after(node):
                gm.graph.call_function(_mark, (node, name))
        for body in bodies(node):
            _mark_ops(body.module, functions)
        function = autograd_function(node) if name in functions.flows else None
        if function is not None:
            functions.note_in(name, function.backward.module)
    gm.recompile()


def _mark(results: Any, name: str) -> None:
    for node in grad_nodes(results):
        node.metadata.setdefault(OP, name)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def grad_nodes(values: Any) -> list[Node]:
    """Return the autograd nodes of the tensors in ``values``."""
    nodes = (grad_fn(leaf) for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))
    return [node for node in nodes if node is not None]


def _watch(
    roots: Sequence[Node],
    before: Mapping[Node, int],
    flows: dict[tuple[Value, ...], Flow],
    functions: _Functions,
    take: Take,
) -> None:
    """Hook the autograd nodes from ``roots`` up to those that existed ``before``, given with the input of each."""
    nodes = _between([root for root in roots if root not in before], before)
    entering = {root: at for at, root in enumerate(root for root in roots if root in nodes)}
    values, positions = _values(nodes, entering, functions.flows)
    edges = [(at, end) for node, at in positions.items() for end, _ in node.next_functions if end is not None]
    owners = tuple((at, before[end]) for at, end in edges if end in before)
    leaving = tuple(dict.fromkeys(at for at, end in edges if end not in nodes))
    flow = flows.setdefault(values, Flow(values, leaving, Listing("backward", ()), owners=owners))
    backward = _Backward(flow, functions, take)
    for node, at in positions.items():
        node.register_hook(partial(backward.note, at, entering.get(node), _own_name(node)))


def _between(roots: Sequence[Node], before: Mapping[Node, int]) -> dict[Node, str]:
    """Return the nodes from ``roots`` on, in the order of a backward, with the op of the forward that made each."""
    made = {root: root.metadata.get(OP, "") for root in roots}
    left = list(roots)
    while left:
        node = left.pop()
        for inner in inner_nodes(node.next_functions):
            if inner not in before and inner not in made:
                made[inner] = inner.metadata.get(OP) or made[node]
                left.append(inner)
    return dict(sorted(made.items(), key=lambda item: made_before(item[0]), reverse=True))


def _values(
    nodes: Mapping[Node, str], entering: Mapping[Node, int], inside: Mapping[str, Flow]
) -> tuple[tuple[Value, ...], dict[Node, int]]:
    """Return the values of a backward, each with its position as its number, and the positions of the nodes.

    ``inside``: the flows of the backwards of Functions, which come before their nodes.
    """
    values = [_value(root, f"gradient_{at}", "gradient", (), Kind.GRADIENT, at) for root, at in entering.items()]
    reads: dict[Node, list[int]] = {node: [entering[node]] if node in entering else [] for node in nodes}
    positions: dict[Node, int] = {}
    for node, name in nodes.items():
        sources, flow = tuple(reads[node]), inside.get(_own_name(node))
        if flow is not None:
            start = len(values)
            values += _inner_values(flow, sources, start)
            sources = tuple(start + at for at in flow.results)
        at = positions[node] = len(values)
        kind = node.name()
        values.append(_value(node, f"{kind}_{at}", f"autograd::{kind}", sources, Kind.OP, at, name))
        for inner in inner_nodes(node.next_functions):
            if inner in reads:
                reads[inner].append(at)
    return tuple(values), positions


def _own_name(node: Node) -> str:
    """Return the name of the forward's op that made ``node``; ``""`` if none did."""
    return str(node.metadata.get(OP, ""))


def _inner_values(flow: Flow, entering: tuple[int, ...], start: int) -> list[Value]:
    """Return the values of a Function's backward from position ``start`` on; ``entering``: its gradients' positions."""
    inner = []
    for at, value in enumerate(flow.values, start):
        if value.kind is Kind.GRADIENT:
            inner.append(replace(value, kind=Kind.OP, inputs=entering, passes=True))
        else:
            number = None if value.number is None else at
            inner.append(replace(value, inputs=tuple(start + source for source in value.inputs), number=number))
    return inner


def _value(
    node: Node, name: str, target: str, inputs: tuple[int, ...], kind: Kind, at: int, forward: str = ""
) -> Value:
    if kind is Kind.OP:  # the gradients that it returns
        dtypes = [gradient_dtypes(end)[index] for end, index in node.next_functions if end is not None]
    else:
        dtypes = gradient_dtypes(node)
    values = tuple(TensorType(dtype_name(dtype), ()) for dtype in dtypes)
    entry = Entry(name, "call_function" if kind is Kind.OP else "placeholder", target, values=values)
    return Value(entry, inputs, kind, at, _LIMIT, forward=forward)


@dataclass
class _Backward:
    """The numbers of the running backward, by position."""

    flow: Flow
    functions: _Functions
    take: Take
    noted: dict[int, Tensor] = field(default_factory=dict)

    @untraced
    def note(self, at: int, entering: int | None, name: str, returned: Sequence[Any], received: Sequence[Any]) -> None:
        """Record the gradients that a node returns, and those that enter the graph at it; a hook of the node."""
        with torch.no_grad():
            if not self.noted:
                after_backward(self.finish)
            self.noted[at] = _largest(returned)
            if entering is not None:
                self.noted[entering] = _largest(received)
            if name in self.functions.numbers:
                inside = self.functions.flows[name].values
                numbers = self.functions.numbers.pop(name).unbind()
                start = at - len(inside)
                self.noted |= {start + i: numbers[v.number] for i, v in enumerate(inside) if v.number is not None}

    @untraced
    def finish(self) -> None:
        """Pass on the recorded numbers; nodes that did not run count as zero."""
        zero = torch.zeros((), device=next(iter(self.noted.values())).device)
        numbers = _stacked([self.noted.get(at, zero) for at in range(len(self.flow.values))])
        self.noted.clear()
        self.take(self.flow, numbers)


def _largest(gradients: Sequence[Any]) -> Tensor:
    """Return the largest magnitude in ``gradients``, 0-dim float32, or float64 if one has that dtype."""
    parts = [part.detach() for value in gradients if isinstance(value, Tensor) for part in inner_tensors(value)]
    dense = [part.coalesce().values() if part.layout is torch.sparse_coo else part for part in parts]
    known = [part for part in dense if part.numel() and (part.is_floating_point() or part.is_complex())]
    if not known:
        return torch.zeros((), device="cpu")
    return _stacked([torch.linalg.vector_norm(part, torch.inf) for part in known]).amax()


def _stacked(numbers: Sequence[Tensor]) -> Tensor:
    """Return 0-dim tensors as one of their widest dtype, at least float32, on the first one's device."""
    wide = torch.float64 if any(number.dtype == torch.float64 for number in numbers) else torch.float32
    return torch.stack([number.to(numbers[0].device, wide) for number in numbers])
