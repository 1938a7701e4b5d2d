"""Compile backwards without the gradients of unused results, instead of writing and reading zeros for them.

Only a run of the backward shows whether a result is used. So a hook makes autograd pass None for unused ones, and the
backward graph is compiled when it first runs, without the gradients that are None; another set of them compiles it
again. So does a run that keeps the graph, if the kernels overwrite saved tensors.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxamp.graph import graph_output
from fxamp.passes.backward.drop_unused_results import DropUnusedResults, spanned_elements
from fxamp.passes.backward.scale_backward import tangents
from fxamp.pipeline import run_traced
from fxamp.pipeline.participant import Boxed, GraphCompiler, Participant, takes_list
from fxamp.policy import Policy
from fxamp.torch_private import (
    compiled_by_aot,
    compiling_again,
    function_of,
    keep_saved_tensors,
    keeps_graph,
    overwriting_saved,
    running_metadata,
    running_node,
    subclass_metadata,
    untraced,
)

#: Maximum number of compiled variants; further sets of unused results get zeros for their gradients.
MOST = 3


def may_be_unused(gm: GraphModule) -> bool:
    """Whether Dynamo's graph ``gm`` has several differentiable results, of fixed sizes, and not only scalars."""
    results = [node.meta.get("example_value") for node in graph_output(gm.graph).all_input_nodes]
    values = [value for value in results if isinstance(value, Tensor) and value.requires_grad]
    fixed = all(type(size) is int for value in values for size in value.shape)
    return torch.is_grad_enabled() and fixed and len(values) > 1 and any(value.dim() for value in values)


@dataclass(frozen=True)
class UnusedResults(Participant):
    """Compiles the backward when it first runs; ``expected``: whether autograd is asked for None instead of zeros.

    Wrappers such as DTensor still get zeros, as does compiled autograd, which compiles the backward itself and traces
    before the hooks run. ``overwrites``: whether kernels may overwrite saved tensors; a backward that keeps the graph,
    by ``retain_graph``, is then compiled apart.
    """

    policy: Policy
    expected: bool = True
    overwrites: bool = False

    @property
    def key(self) -> object:
        return self.expected, self.overwrites

    def forward(self, compiler: GraphCompiler) -> GraphCompiler:
        def compile_keeping(gm: GraphModule, inputs: Sequence[Any]) -> Boxed:
            keep_saved_tensors()
            return compiler(gm, inputs)

        return compile_keeping

    def backward(self, compiler: GraphCompiler) -> GraphCompiler:
        def compile_late(gm: GraphModule, inputs: Sequence[Any]) -> Boxed:
            return self._by_used_results(gm, inputs, compiler)

        return compile_late

    def run(self, run: Callable[..., Any], gm: GraphModule, lowering: str) -> Callable[..., Any]:
        """Ask autograd for None as the gradient of each unused result."""
        return _asking_for_none(run) if self.expected else run

    def _by_used_results(self, gm: GraphModule, inputs: Sequence[Any], compiler: GraphCompiler) -> Boxed:
        """Return a callable for the backward graph ``gm`` that accepts None for tangents."""
        nodes = list(gm.graph.find_nodes(op="placeholder"))
        entering = set(tangents(gm))
        positions = [at for at, node in enumerate(nodes) if node in entering]
        again, lock = compiling_again(), Lock()
        variants: dict[tuple[frozenset[int], bool], Boxed] = {}

        def variant(absent: frozenset[int], overwrites: bool) -> Boxed:
            graph = deepcopy(gm)
            if absent:
                run_traced(graph, self.policy, DropUnusedResults(tuple(nodes[at].name for at in sorted(absent))))
            with again(), running_metadata(), overwriting_saved() if overwrites else nullcontext():
                return compiler(graph, [value for at, value in enumerate(inputs) if at not in absent])

        def run(args: list[Any]) -> Any:
            absent = frozenset([at for at in positions if args[at] is None])
            overwrites = self.overwrites and not keeps_graph()
            if not absent and (absent, overwrites) in variants:
                return variants[absent, overwrites](args)
            with lock:
                compiled_for = {combination for combination, _ in variants}
                if absent not in compiled_for and len(compiled_for) >= MOST:
                    for at in absent:
                        args[at] = _zeros(nodes[at].meta["val"])
                    absent = frozenset()
                if (absent, overwrites) not in variants:
                    keeping = variants.get((absent, False))  # a variant that keeps saved tensors serves all runs
                    variants[absent, overwrites] = keeping or variant(absent, overwrites)
            for at in sorted(absent, reverse=True):
                del args[at]
            return variants[absent, overwrites](args)

        return takes_list(run)


def _zeros(value: Tensor) -> Tensor:
    """Return zeros with the sizes, strides, dtype and device of ``value``: views in the graph depend on the strides."""
    flat = torch.zeros(spanned_elements(value), dtype=value.dtype, device=value.device)
    return flat.as_strided(tuple(value.shape), value.stride())


def _asking_for_none(compiled: Callable[..., Any]) -> Callable[..., Any]:
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
    """Return autograd's node of ``value``. An input that is also a result has the node of another graph."""
    return value.grad_fn if isinstance(value, Tensor) else None


@untraced
def _ask(_: Any) -> None:
    """A hook without a reference to its node: with one, the node would keep alive all that it saved."""
    node = running_node()
    if node is None:  # under compiled autograd
        return
    keep_saved_tensors(node)
    if subclass_metadata(function_of(node)) is None:
        node.set_materialize_grads(False)
