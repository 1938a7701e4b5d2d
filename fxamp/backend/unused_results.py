"""Compile backwards without the gradients of unused results, instead of writing and reading zeros for them.

Whether a result is used is known only when the backward runs. So autograd is asked to pass None, and the backward graph
is compiled when it first runs, without the gradients that are None; another set of them compiles it again.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxamp.capture import Captured
from fxamp.graph import fake_mode_of, graph_output
from fxamp.passes.backward.drop_unused import DropUnused
from fxamp.passes.backward.scale_backward import tangents
from fxamp.passes.base import Context, PassSequence
from fxamp.pipeline import run_passes
from fxamp.torch_private import (
    compiled_by_aot,
    compiling_again,
    function_of,
    keep_if_retained,
    running_node,
    subclass_metadata,
    untraced,
)

#: Compiles a backward graph for its example inputs; the result takes its inputs in one list.
Compiler = Callable[[GraphModule, list[Any]], Callable[[list[Any]], Any]]

#: Maximum number of compiled variants; further sets of unused results get zeros for their gradients.
MOST = 3


def may_be_unused(gm: GraphModule) -> bool:
    """Whether Dynamo's graph ``gm`` has several differentiable results, of fixed sizes, and not only scalars."""
    found = [node.meta.get("example_value") for node in graph_output(gm.graph).all_input_nodes]
    values = [value for value in found if isinstance(value, Tensor) and value.requires_grad]
    fixed = all(type(size) is int for value in values for size in value.shape)
    return torch.is_grad_enabled() and fixed and len(values) > 1 and any(value.dim() for value in values)


def asking_for_none(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``compiled``, whose backward gets None for the gradients of unused results.

    Use it for graphs whose backward is compiled :func:`by_used_results`. Wrappers such as DTensor still get zeros. So
    does compiled autograd, which compiles the backward itself and traces before the hooks run.
    """

    def call(*args: Any) -> Any:
        before = [_node(value) for value in args]
        results = compiled(*args)
        for node in map(_node, results):
            function = None if node is None or node in before else function_of(node)
            if compiled_by_aot(function):
                node.register_prehook(_ask)
                break
        return results

    return call


def _node(value: Any) -> Any:
    """Return autograd's node of ``value``. An input that is a result too has the node of the graph that made it."""
    return value.grad_fn if isinstance(value, Tensor) else None


@untraced
def _ask(_: Any) -> None:
    """A hook without a reference to its node: with one, the node would keep alive all that it saved."""
    node = running_node()
    if node is None:  # under compiled autograd
        return
    keep_if_retained(node)
    if subclass_metadata(function_of(node)) is None:
        node.set_materialize_grads(False)


def by_used_results(gm: GraphModule, inputs: Sequence[Any], compiler: Compiler) -> Callable[[list[Any]], Any]:
    """Return a callable for the backward graph ``gm`` that accepts None for tangents; compiles when it first runs."""
    nodes = list(gm.graph.find_nodes(op="placeholder"))
    entering = set(tangents(gm))
    positions = [at for at, node in enumerate(nodes) if node in entering]
    again, making = compiling_again(), Lock()
    made: dict[frozenset[int], Callable[[list[Any]], Any]] = {}

    def variant(absent: frozenset[int]) -> Callable[[list[Any]], Any]:
        graph = deepcopy(gm)
        _drop(graph, tuple(nodes[at].name for at in sorted(absent)))
        with again():
            return compiler(graph, [value for at, value in enumerate(inputs) if at not in absent])

    def run(args: list[Any]) -> Any:
        absent = frozenset(at for at in positions if args[at] is None)
        with making:
            if absent not in made and len(made) >= MOST:
                for at in absent:
                    value = nodes[at].meta["val"]
                    args[at] = torch.zeros(tuple(value.shape), dtype=value.dtype, device=value.device)
                absent = frozenset()
            if absent not in made:
                made[absent] = variant(absent)
        for at in sorted(absent, reverse=True):
            del args[at]
        return made[absent](args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _drop(gm: GraphModule, names: tuple[str, ...]) -> None:
    if names:
        values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder") if node.name in names]
        mode = fake_mode_of(values[0])
        assert mode is not None
        run_passes(Captured(gm, mode), Context(mode), PassSequence("unused results", (DropUnused(names),)))
