"""Watch the backward of a graph that runs eagerly: what each of autograd's nodes returns, by the op that made the node.

No graph of such a backward exists. So each op of the forward marks the autograd nodes of its results. After a run the
nodes between the results of the graph and its inputs are hooked, and a flow is made of them: with one number for each
node, and for each gradient that enters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge as gradient_edge
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxamp.graph import dtype_name, inner_tensors
from fxamp.graph.higher_order import bodies
from fxamp.graph_text import Entry, Listing
from fxamp.graph_text.model import TensorType
from fxamp.nonfinite.flow import Flow, Kind, Value
from fxamp.passes.shared.magnitudes import OP
from fxamp.torch_private import Node, after_backward, gradient_dtypes, inner_nodes, made_before, untraced

#: Takes the numbers of a backward.
Take = Callable[[Flow, Tensor], None]

#: Whether a gradient is finite is seen from its largest magnitude alone, in whatever dtype.
_LIMIT = torch.finfo(torch.float64).max


def watch_backward(run: Callable[..., Any], gm: GraphModule, take: Take) -> Callable[..., Any]:
    """Return ``run``, which runs ``gm`` eagerly; it watches its backwards, and hands what they measure to ``take``."""
    _mark_ops(gm)
    flows: dict[tuple[Value, ...], Flow] = {}

    def call(*args: Any) -> Any:
        before = {gradient_edge(value).node: at for at, value in enumerate(args) if _has_gradient(value)}
        results = run(*args)
        if torch.is_grad_enabled():
            _watch(list(dict.fromkeys(value.grad_fn for value in _differentiable(results))), before, flows, take)
        return results

    return call


def _mark_ops(gm: GraphModule) -> None:
    """Let each op of ``gm``, and of the bodies of its checkpoints and conds, mark the autograd nodes of its results."""
    for node in list(gm.graph.nodes):
        name = node.meta.get("custom", {}).get(OP)
        if name is not None and node.op.startswith("call"):
            with gm.graph.inserting_after(node):
                gm.graph.call_function(_mark, (node, name))
        for body in bodies(node):
            _mark_ops(body.module)
    gm.recompile()


def _mark(results: Any, name: str) -> None:
    for value in _differentiable(results):
        value.grad_fn.metadata.setdefault(OP, name)  # type: ignore[union-attr]


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _differentiable(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]


def _watch(roots: Sequence[Node], before: Mapping[Node, int], flows: dict[tuple[Value, ...], Flow], take: Take) -> None:
    """Hook the autograd nodes that lead from ``roots`` to those that there were ``before``: of which input each is."""
    nodes = _between([root for root in roots if root not in before], before)
    entering = {root: at for at, root in enumerate(root for root in roots if root in nodes)}
    positions = {node: len(entering) + at for at, node in enumerate(nodes)}
    values = _values(nodes, entering, positions)
    edges = [(at, end) for node, at in positions.items() for end, _ in node.next_functions if end is not None]
    owners = tuple((at, before[end]) for at, end in edges if end in before)
    leaving = tuple(dict.fromkeys(at for at, end in edges if end not in nodes))
    flow = flows.setdefault(values, Flow(values, leaving, Listing("backward", ()), owners=owners))
    backward = _Backward(flow, take)
    for node, at in positions.items():
        node.register_hook(partial(backward.note, at, entering.get(node)))


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


def _values(nodes: dict[Node, str], entering: dict[Node, int], positions: dict[Node, int]) -> tuple[Value, ...]:
    values = [_value(root, f"gradient_{at}", "gradient", (), Kind.GRADIENT, at) for root, at in entering.items()]
    reads: dict[Node, list[int]] = {node: [entering[node]] if node in entering else [] for node in nodes}
    for node, name in nodes.items():
        at, kind = positions[node], node.name()
        values.append(_value(node, f"{kind}_{at}", f"autograd::{kind}", tuple(reads[node]), Kind.OP, at, name))
        for inner in inner_nodes(node.next_functions):
            if inner in reads:
                reads[inner].append(at)
    return tuple(values)


def _value(
    node: Node, name: str, target: str, inputs: tuple[int, ...], kind: Kind, at: int, forward: str = ""
) -> Value:
    dtypes = [TensorType(dtype_name(dtype), ()) for dtype in gradient_dtypes(node)]
    entry = Entry(name, "call_function" if kind is Kind.OP else "placeholder", target, values=tuple(dtypes))
    return Value(entry, inputs, kind, at, _LIMIT, forward=forward)


@dataclass
class _Backward:
    """The numbers of the backward that runs, by position."""

    flow: Flow
    take: Take
    noted: dict[int, Tensor] = field(default_factory=dict)

    @untraced
    def note(self, at: int, entering: int | None, returned: Sequence[Any], received: Sequence[Any]) -> None:
        """Note what a node returns, and what entered the graph at it; called as a hook of the node."""
        with torch.no_grad():
            if not self.noted:
                after_backward(self.finish)
            self.noted[at] = _largest(returned)
            if entering is not None:
                self.noted[entering] = _largest(received)

    @untraced
    def finish(self) -> None:
        """Hand on what was noted; what did not run is as if it were zero."""
        zero = torch.zeros((), device=next(iter(self.noted.values())).device)
        numbers = _stacked([self.noted.get(at, zero) for at in range(self.flow.numbers)])
        self.noted.clear()
        self.take(self.flow, numbers)


def _largest(gradients: Sequence[Any]) -> Tensor:
    """Return the largest magnitude in ``gradients``, 0-dim float32, or float64 if one has that dtype."""
    parts = [part.detach() for value in gradients if isinstance(value, Tensor) for part in inner_tensors(value)]
    dense = [part.coalesce().values() if part.layout is torch.sparse_coo else part for part in parts]
    known = [part for part in dense if part.numel() and (part.is_floating_point() or part.is_complex())]
    if not known:
        return torch.zeros(())
    return _stacked([torch.linalg.vector_norm(part, torch.inf) for part in known]).amax()


def _stacked(numbers: Sequence[Tensor]) -> Tensor:
    """Return 0-dim tensors as one of their widest dtype, at least float32, on the first one's device."""
    wide = torch.float64 if any(number.dtype == torch.float64 for number in numbers) else torch.float32
    return torch.stack([number.to(numbers[0].device, wide) for number in numbers])
