"""Scale a backward under AOTAutograd: the pass at compile time, the scale and the flags at run time.

AOTAutograd passes the partitioned backward graph to a compiler. fxamp first rewrites it with the pass
``scale-backward``, and wraps the compiled result: the wrapper appends the scale to the inputs, removes the flags
from the outputs, and reports them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxamp.errors import OptionError
from fxamp.graph import graph_output
from fxamp.passes.backward.scale_backward import FLAGGED, SCALE, ScaleBackward, gradients, in_float16, tangents
from fxamp.policy import Policy
from fxamp.scaler.graphs.double_backward import explain_double_backward
from fxamp.scaler.graphs.owners import leaves, owners
from fxamp.scaler.outside_graphs.borders import SCALED_BY, ScaledBy, crossed
from fxamp.scaler.scale import BackwardScaler, reciprocal, times
from fxamp.torch_private import current_metadata, running_node

#: A compiled graph that takes its inputs in one list and empties the list.
Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Scaling:
    """A scaler, and the policy of the graphs that it scales."""

    scaler: BackwardScaler
    policy: Policy

    def begin(self) -> None:
        """Attach the scaler. Raises OptionError if compiled autograd would run the backward without scaling it."""
        if torch._dynamo.config.compiled_autograd:
            raise OptionError(
                "torch._dynamo.config.compiled_autograd bypasses the compiler of AOTAutograd's backward graphs, so "
                "option 'scaler' would have no effect; accepted with a scaler: compiled_autograd = False"
            )
        self.scaler.attach()

    def watching(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``compiled``, with each run reported to the scaler."""
        runs = self.scaler.graphs.note_forward

        def call(*args: Any) -> Any:
            runs()
            return compiled(*args)

        return call

    def mark_forward(self) -> None:
        """Record on the graph that AOTAutograd is compiling which scaler scales its backward."""
        metadata = current_metadata()
        if metadata is not None:
            setattr(metadata, SCALED_BY, ScaledBy(self.scaler))

    def backward_pass(self, gm: GraphModule) -> ScaleBackward:
        """Return the pass for the backward graph ``gm``."""
        return ScaleBackward(_check(gm), self.scaler.graph_norm)

    def compile_backward(
        self, gm: GraphModule, inputs: Sequence[Any], compiler: Callable[[GraphModule, list[Any]], Boxed]
    ) -> Boxed:
        """Compile the rewritten backward graph ``gm`` with ``compiler``, which returns a boxed callable; wrap that."""
        flagged = graph_output(gm.graph).meta.get(FLAGGED, ())
        if not flagged:
            return compiler(gm, list(inputs))
        scale = next(node.meta["val"] for node in gm.graph.find_nodes(op="placeholder") if node.name == SCALE)
        halves = _Halves.of(gm)
        return _wrap(compiler(gm, [*inputs, scale]), self.scaler, scale.device, flagged, halves, self.scaler.graph_norm)


def boxed(function: Callable[..., Any]) -> Boxed:
    """Return ``function`` with all its arguments in one list."""

    def run(args: list[Any]) -> Any:
        return function(*args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True)
class _Halves:
    """The float16 gradients that enter or leave a backward graph; the pass expects them scaled.

    Outside the graph they are scaled only if the scaler's walk found the graph, and never in the ``.grad`` of a leaf.
    ``entering``: positions among the inputs; ``leaving``: among the outputs.
    """

    entering: tuple[int, ...]
    leaving: tuple[int, ...]

    @staticmethod
    def of(gm: GraphModule) -> "_Halves":
        """Return those of a graph that the pass has rewritten."""
        halves = {node for node in tangents(gm) if in_float16(node)}
        inputs, outputs = gm.graph.find_nodes(op="placeholder"), graph_output(gm.graph).args[0]
        return _Halves(
            tuple(at for at, node in enumerate(inputs) if node in halves),
            tuple(at for at in gradients(gm) if in_float16(outputs[at])),  # type: ignore[index]
        )

    def enter(self, args: list[Any], scale: Tensor) -> None:
        """Scale the unscaled gradients among the graph's inputs."""
        for at in self.entering:
            args[at] = times(args[at], scale.to(args[at].device))

    def leave(self, results: list[Any], scale: Tensor, node: Any, crossed: bool) -> None:
        """Unscale the results that must be unscaled outside the graph."""
        if not self.leaving:
            return
        ends = leaves(node, len(results))
        for at in self.leaving:
            if not crossed or ends[at] is not None:
                results[at] = times(results[at], reciprocal(scale).to(results[at].device))


def _wrap(
    compiled: Boxed, scaler: BackwardScaler, device: torch.device, flagged: tuple[int, ...], halves: _Halves, norm: bool
) -> Boxed:
    def run(args: list[Any]) -> list[Any]:
        node, scale = running_node(), scaler.graph_scale(device)
        scaled_outside = crossed(node)
        if not scaled_outside:
            halves.enter(args, scale)
        args.append(scale)
        results = list(compiled(args))
        square = results.pop() if norm else None
        flags = results.pop()
        halves.leave(results, scale, node, scaled_outside)
        outputs = [results[at] for at in flagged]
        scaler.graphs.record(owners(node, len(results), flagged), flags, outputs, square)
        explain_double_backward(node)
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _check(gm: GraphModule) -> str:
    """Return the cheaper way to check this graph; see the pass."""
    values = (node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))
    on_cuda = any(isinstance(value, Tensor) and value.device.type == "cuda" for value in values)
    return "kernel" if on_cuda else "ops"
