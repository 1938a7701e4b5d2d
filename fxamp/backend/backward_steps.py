"""Step parameters in compiled backwards, for policies with ``[optimizer] in_backward``.

The pass hand-over-gradients makes the graph hand over gradients of parameters as soon as they are computed. Each goes
to the optimizer of its parameter. Gradients without an optimizer, and those that must not be stepped now, are returned
as usual.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxamp.errors import OptionError
from fxamp.graph import graph_output
from fxamp.kernels.hand_over import receiving
from fxamp.optim.compiled_optimizer import backward_steps
from fxamp.optim.in_backward import BackwardStep, require_policy
from fxamp.passes.backward.hand_over_gradients import HANDED_OVER, HandOverGradients
from fxamp.passes.backward.scale_backward import gradients
from fxamp.pipeline import run_traced
from fxamp.pipeline.participant import Boxed, GraphCompiler, Participant, refuse_eager, takes_list, uses_cuda_graphs
from fxamp.policy import Policy
from fxamp.reports.warnings import warn_once
from fxamp.scaler.graphs.owners import owners
from fxamp.torch_private import accumulates, current_metadata, running_node, running_wrapper

GROUP = 64 << 20
"""The minimum bytes of gradients that are stepped together: enough that the cost of a step's launches is negligible."""

_NO_OPTIMIZER = (
    "policy %s has in_backward = true, but no optimizer steps in backwards: gradients go to .grad. Use "
    "fxamp.compile_optimizer(optimizer, policy) with this policy"
)


@dataclass(frozen=True)
class BackwardSteps(Participant):
    """A policy with ``in_backward``; ``scaled``: whether there is a scaler too."""

    policy: Policy
    scaled: bool

    @property
    def needs_backward(self) -> str:
        return f"policy {self.policy.name!r} has in_backward = true"

    def refuse(self, lowering: str, inductor: Mapping[str, Any]) -> None:
        what = self.needs_backward
        refuse_eager(what, lowering)
        super().refuse(lowering, inductor)
        require_policy(self.policy)
        if self.scaled:
            raise OptionError(
                f"{what}, and option 'scaler' decides after the backward whether to step; accepted: only one of them"
            )
        if uses_cuda_graphs(inductor):
            raise OptionError(
                f"{what}, and CUDA graphs would replay a backward without its steps; accepted: a mode without them"
            )

    def backward(self, compiler: GraphCompiler) -> GraphCompiler:
        def compile_stepping(gm: GraphModule, inputs: Sequence[Any]) -> Boxed:
            run_traced(gm, self.policy, HandOverGradients(_places(gm), GROUP))
            names = graph_output(gm.graph).meta.get(HANDED_OVER, {})
            positions = {node.name: at for at, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
            read = {place: None if name is None else positions[name] for place, name in names.items()}
            compiled = compiler(gm, inputs)
            return _stepping(compiled, read, self.policy.name) if read else compiled

        return compile_stepping

    def run(self, run: Callable[..., Any], gm: GraphModule, lowering: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            wrapper = running_wrapper()
            if wrapper is not None:
                raise OptionError(
                    f"policy {self.policy.name!r} has in_backward = true, and {type(wrapper).__name__} sums gradients "
                    "after the graph's backward; accepted: one process, or a policy without in_backward"
                )
            return run(*args)

        return call


@dataclass
class _Run:
    """One run of a backward graph: the parameters to step, by the positions of their gradients among its outputs.

    ``steps``: what steps each, decided as the backward begins. ``early``: those stepped as soon as their gradients
    exist. ``late``: those stepped after the graph has run, because it may read their memory in ways that its code does
    not show. Other gradients are returned. ``results``: gradients that wait for the end.
    """

    steps: Mapping[int, BackwardStep]
    early: Mapping[int, Tensor]
    late: Mapping[int, Tensor]
    results: dict[int, Tensor] = field(default_factory=dict)

    def receive(self, gradients: Sequence[Tensor], places: Sequence[int]) -> None:
        """Step the parameters that can be stepped; copy the other gradients, whose memory the graph reuses."""
        by_place = dict(zip(places, gradients, strict=True))
        self._step(self.early, {place: by_place[place] for place in places if place in self.early})
        self.results.update({place: by_place[place].clone() for place in places if place not in self.early})

    def finish(self) -> None:
        """Step the parameters that had to wait for the end."""
        self._step(self.late, {place: self.results.pop(place) for place in self.late if place in self.results})

    def _step(self, parameters: Mapping[int, Tensor], gradients: Mapping[int, Tensor]) -> None:
        groups: dict[BackwardStep, list[int]] = {}
        for place in gradients:
            groups.setdefault(self.steps[place], []).append(place)
        for step, members in groups.items():
            step([parameters[place] for place in members], [gradients[place] for place in members])


def _places(gm: GraphModule) -> tuple[int, ...]:
    """Return the places of the gradients of parameters; of all gradients if Dynamo does not name the parameters."""
    static = getattr(current_metadata(), "static_input_indices", None)
    places = gradients(gm)
    return tuple(places if static is None else sorted({*places} & {*static}))


def _stepping(compiled: Boxed, read: Mapping[int, int | None], policy: str) -> Boxed:
    """Return the backward that steps; ``read``: by place of a gradient, the position of its parameter's input."""

    def run(args: list[Any]) -> list[Any]:
        state = _begin(args, read, policy)
        with receiving(state.receive):
            results = list(compiled(args))
        state.finish()
        for place, gradient in state.results.items():
            results[place] = gradient
        return results

    return takes_list(run)


def _begin(args: Sequence[Any], read: Mapping[int, int | None], policy: str) -> _Run:
    """Decide which optimizer steps which parameter. Raises RuntimeError if the parameters must not be stepped."""
    places, node = list(read), running_node()
    ends = [None] * len(places) if node is None else owners(node, len(node.needs_input_grad), places)
    parameters = {at: leaf for at, leaf in zip(places, ends, strict=True) if leaf is not None and accumulates(leaf)}
    plain = {at: leaf for at, leaf in parameters.items() if _is_plain(leaf)}
    steps = {at: step for at, step in zip(plain, backward_steps(plain.values()), strict=True) if step is not None}
    if parameters and not steps:
        warn_once(__name__, _NO_OPTIMIZER, policy)
    if len({_memory(parameters[at]) for at in steps}) < len(steps):
        return _Run({}, {}, {})  # they share memory, or autograd sums their gradients
    for step in {*steps.values()}:
        step.require([parameters[at] for at in steps if steps[at] is step])
    inputs: dict[int, set[int | None]] = {}
    for at, value in enumerate(args):
        if isinstance(value, Tensor):
            inputs.setdefault(_memory(value), set()).add(at)
    late = {at: parameters[at] for at in steps if inputs.get(_memory(parameters[at]), set()) - {read[at]}}
    return _Run(steps, {place: parameters[place] for place in steps if place not in late}, late)


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) is nn.Parameter and parameter.layout is torch.strided


def _memory(tensor: Tensor) -> int:
    """Return what identifies the memory of ``tensor``; wrappers and sparse tensors have no parameter's."""
    plain = tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter)
    return tensor.untyped_storage().data_ptr() if plain else 0
