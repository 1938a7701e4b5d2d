"""The participant that measures a graph's values: it takes their numbers from the results to the monitor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from fxamp.capture import Captured
from fxamp.graph import all_nodes, is_wrapper, mode_of
from fxamp.graph_text import Listing
from fxamp.nonfinite.eager_backward import Take, grad_nodes, watch_backward
from fxamp.nonfinite.flow import Flow, Kind
from fxamp.nonfinite.flow_reader import flow_of
from fxamp.nonfinite.monitor import Call, Monitor
from fxamp.passes.backward.measure_gradients import MeasureGradients
from fxamp.passes.base import Context
from fxamp.passes.forward.measure_results import MeasureResults
from fxamp.pipeline import run_passes
from fxamp.pipeline.participant import Boxed, GraphCompiler, Participant, takes_list
from fxamp.reports.list_graph import list_graph
from fxamp.reports.warnings import Example, warn_once
from fxamp.torch_private import compiled_by_aot, function_of, inner_nodes, running_node


@dataclass(frozen=True)
class Watching(Participant):
    """Watches one graph for values that are not finite.

    ``ended``: a graph break ended it. If some of its results then have a gradient, those without one, such as targets,
    are not checked here. If such a value makes a later graph produce a NaN, that graph names it as an input.
    """

    monitor: Monitor
    lowering: str
    ended: bool = False

    @property
    def key(self) -> object:
        return "measured"

    @property
    def needs_backward(self) -> str:
        return "option 'nonfinite' measures the values of backward graphs"

    def captured(self, graph: Captured, inputs: Sequence[Any], listing: Listing) -> None:
        """Measure the values of the graph."""
        _warn_unmeasured(graph.module)
        run_passes(graph, Context(graph.mode), MeasureResults(backwards=self.lowering == "eager"))
        kinds = [Kind.PARAMETER if isinstance(value, torch.nn.Parameter) else Kind.INPUT for value in inputs]
        self.monitor.forward = flow_of(graph.module, listing, kinds)

    def backward(self, compiler: GraphCompiler) -> GraphCompiler:
        def compile_measured(gm: GraphModule, inputs: Sequence[Any]) -> Boxed:
            mode = mode_of(gm)
            if mode is None:
                return compiler(gm, inputs)
            listing = list_graph(gm, stage="backward")
            run_passes(Captured(gm, mode), Context(mode), MeasureGradients())
            flow = flow_of(gm, listing)
            compiled = compiler(gm, inputs)
            return self._watched(compiled, flow) if flow.numbers else compiled

        return compile_measured

    def run(self, run: Callable[..., Any], gm: GraphModule, lowering: str) -> Callable[..., Any]:
        flow = self.monitor.forward
        if flow is None or not flow.numbers:
            return run

        watched = watch_backward(run, gm, flow) if lowering == "eager" else _noted(run)

        def call(*args: Any) -> Any:
            call = self.monitor.begin()
            *results, numbers = watched(partial(self._take, call, backward=True), args)
            self._take(call, self._judged(results), numbers)
            return tuple(results)

        return call

    def _judged(self, results: Sequence[Any]) -> Flow:
        """Return the flow by which a run is checked; it is known after the first run."""
        flow = self.monitor.forward
        assert flow is not None, "what is measured is known"
        if self.ended and flow.returned:
            flow = flow.of_gradients([isinstance(value, Tensor) and value.requires_grad for value in results])
            flow = self.monitor.forward = replace(flow, returned=())
        return flow

    def _watched(self, compiled: Boxed, flow: Flow) -> Boxed:
        def run(args: list[Any]) -> list[Any]:
            results = [*compiled(args)]
            take = running_node().metadata.get(_TAKE) or partial(self._take, None, backward=True)
            take(flow, results.pop())
            return results

        return takes_list(run)

    def _take(self, call: Call | None, flow: Flow, numbers: Tensor, backward: bool = False) -> None:
        if not isinstance(numbers, FakeTensor):
            self.monitor.take(call, flow, numbers, backward)


#: Key of the metadata of AOTAutograd's node: a function that receives the numbers of its backward.
_TAKE = "fxamp_take"


def _noted(run: Callable[..., Any]) -> Callable[[Take, Sequence[Any]], Any]:
    """Return ``run``, which also records on the autograd node of each run who receives the numbers of its backward.

    The node is found from the results, and from inputs that the graph wrote to, at most one node up the autograd graph.
    """

    def call(take: Take, args: Sequence[Any]) -> Any:
        results = run(*args)
        ends = grad_nodes((results, args))
        for node in [*ends, *(inner for end in ends for inner in inner_nodes(end.next_functions))]:
            if compiled_by_aot(function_of(node)):
                node.metadata.setdefault(_TAKE, take)
        return results

    return call


def _warn_unmeasured(gm: GraphModule) -> None:
    """Log the tensor subclasses of ``gm``, such as DTensors, which are not measured in a forward."""
    wrappers = [type(value) for node in all_nodes(gm) if is_wrapper(value := node.meta.get("val"))]
    if wrappers:
        warn_once(
            __name__,
            "option 'nonfinite' measures no %s in a forward: it skips %s of a graph; their gradients are measured "
            "where AOTAutograd compiles the backward; accepted: to_local() or full_tensor() before an op",
            " or ".join(sorted({wrapper.__name__ for wrapper in wrappers})),
            Example(f"{len(wrappers)} values"),
        )
