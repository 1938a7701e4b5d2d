"""Scale a backward under AOTAutograd: the pass at compile time, the scale and the flags at run time.

AOTAutograd passes the partitioned backward graph to a compiler. fxamp first rewrites it with the pass
``scale-backward``, and wraps the compiled result: the wrapper appends the scale to the inputs, removes the flags
from the outputs, and reports them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxamp.errors import OptionError
from fxamp.graph import graph_output, returned, tensor_value
from fxamp.optim.gradients import reciprocal
from fxamp.optim.identity import has_identity
from fxamp.passes.backward.scale_backward import FLAGGED, SCALE, ScaleBackward, gradients, tangents
from fxamp.passes.shared.unscale_and_check import in_float16
from fxamp.pipeline import run_traced
from fxamp.pipeline.participant import Boxed, GraphCompiler, Participant, takes_list
from fxamp.policy import Policy
from fxamp.scaler.graphs.double_backward import explain_double_backward
from fxamp.scaler.graphs.owners import leaves, owner_references
from fxamp.scaler.outside_graphs.borders import SCALED_BY, ScaledBy, crossed
from fxamp.scaler.outside_graphs.eager_region import scale_eagerly
from fxamp.scaler.scale import BackwardScaler, times
from fxamp.torch_devices import known
from fxamp.torch_dtypes import HALVES
from fxamp.torch_private import current_metadata, forward_results, keep_saved_tensors, running_node, running_wrapper


@dataclass(frozen=True)
class Scaling(Participant):
    """A scaler, and the policy of the graph that it scales; ``last``: whether only its parameters need gradients."""

    scaler: BackwardScaler
    policy: Policy
    last: bool = False

    @staticmethod
    def of(scaler: BackwardScaler, policy: Policy, gm: GraphModule) -> "Scaling":
        """Return the participant that scales Dynamo's graph ``gm``."""
        inputs = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        trained = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
        return Scaling(scaler, policy, all(isinstance(value, nn.Parameter) for value in trained))

    @property
    def key(self) -> object:
        return self.scaler.graph_norm, self.last

    @property
    def needs_backward(self) -> str:
        return "option 'scaler' scales backward graphs"

    def refuse(self, lowering: str, inductor: Mapping[str, Any]) -> None:
        """Attach the scaler. Raises OptionError if it cannot be, or compiled autograd would run the backward."""
        super().refuse(lowering, inductor)
        self.scaler.attach()

    def read_backward(self, backward: GraphModule, lowering: str) -> None:
        """Raise OptionError if a gradient is sparse: Inductor's code for products of sparse tensors does not run."""
        results = returned(backward.graph)
        sparse = any(results[at].meta["val"].layout is not torch.strided for at in gradients(backward))
        if sparse and lowering == "inductor":
            raise OptionError(
                "a gradient is sparse, like that of an embedding with sparse=True; with a scaler, lowering = "
                "'inductor' cannot unscale it; accepted: 'aot_eager', 'eager', or sparse=False"
            )

    def forward(self, compiler: GraphCompiler) -> GraphCompiler:
        """Record on the graph that AOTAutograd is compiling which scaler scales its backward."""

        def compile_marked(gm: GraphModule, inputs: Sequence[Any]) -> Boxed:
            keep_saved_tensors()
            metadata = current_metadata()
            if metadata is not None:
                setattr(metadata, SCALED_BY, ScaledBy(self.scaler, _may_cross_in_float16(gm, metadata), self.last))
            return compiler(gm, inputs)

        return compile_marked

    def backward(self, compiler: GraphCompiler) -> GraphCompiler:
        def compile_scaled(gm: GraphModule, inputs: Sequence[Any]) -> Boxed:
            run_traced(gm, self.policy, ScaleBackward(_check(gm), self.scaler.graph_norm))
            covered = graph_output(gm.graph).meta.get(FLAGGED, ())
            if not covered:
                return compiler(gm, inputs)
            scale = next(node.meta["val"] for node in gm.graph.find_nodes(op="placeholder") if node.name == SCALE)
            narrow = _Float16Gradients.of(gm)
            compiled = compiler(gm, [*inputs, scale])
            results = returned(gm.graph)
            dense = all(has_identity(results[at].meta["val"]) for every in covered for at in every)
            return _wrap(compiled, self.scaler, scale.device, covered, narrow, dense)

        return compile_scaled

    def run(self, run: Callable[..., Any], gm: GraphModule, lowering: str) -> Callable[..., Any]:
        """Report each run to the scaler. Without a backward graph, scale gradients where they enter and leave."""
        scaled = scale_eagerly(run, gm, self.scaler) if lowering == "eager" else run
        graphs = self.scaler.graphs

        def call(*args: Any) -> Any:
            wrapper = running_wrapper()
            if wrapper is not None:
                graphs.note_forward(wrapper)
            return scaled(*args)

        return call


def _may_cross_in_float16(forward: GraphModule, metadata: Any) -> bool:
    """Whether float16 gradients may enter or leave the backward of AOTAutograd's ``forward``."""
    nodes = (*forward.graph.find_nodes(op="placeholder"), *forward_results(returned(forward.graph), metadata))
    return any(value is not None and value.dtype in HALVES for value in map(tensor_value, nodes))


@dataclass(frozen=True)
class _Float16Gradients:
    """The float16 gradients that enter or leave a backward graph; the pass expects them scaled.

    Outside the graph they are scaled only if the scaler's walk found the graph, and never in the ``.grad`` of a leaf.
    ``entering``: positions among the inputs; ``leaving``: among the outputs.
    """

    entering: tuple[int, ...]
    leaving: tuple[int, ...]

    @staticmethod
    def of(gm: GraphModule) -> "_Float16Gradients":
        """Return the float16 gradients of a graph that the pass has rewritten."""
        narrow = {node for node in tangents(gm) if in_float16(node)}
        inputs, outputs = gm.graph.find_nodes(op="placeholder"), returned(gm.graph)
        return _Float16Gradients(
            tuple(at for at, node in enumerate(inputs) if node in narrow),
            tuple(at for at in gradients(gm) if in_float16(outputs[at])),
        )

    @property
    def any(self) -> bool:
        """Whether there are such gradients."""
        return bool(self.entering or self.leaving)

    def enter(self, args: list[Any], scale: Tensor) -> None:
        """Scale the unscaled gradients among the graph's inputs."""
        for at in self.entering:
            args[at] = times(args[at], scale.to(args[at].device))

    def leave(self, results: list[Any], scale: Tensor, crossed: bool) -> None:
        """Unscale the results that must be unscaled outside the graph."""
        ends = leaves(running_node(), len(results))
        for at in self.leaving:
            if not crossed or ends[at] is not None:
                results[at] = times(results[at], reciprocal(scale).to(results[at].device))


def _wrap(
    compiled: Boxed,
    scaler: BackwardScaler,
    device: torch.device,
    covered: Sequence[Sequence[int]],
    narrow: _Float16Gradients,
    dense: bool,
) -> Boxed:
    """``covered``: the positions of each flag's gradients; ``dense``: whether all gradients have an identity."""
    norm, crosses, flagged = scaler.graph_norm, narrow.any, [at for every in covered for at in every]

    def run(args: list[Any]) -> list[Any]:
        scale = scaler.graph_scale(device)
        scaled_outside = crosses and crossed(running_node())
        if crosses and not scaled_outside:
            narrow.enter(args, scale)
        args.append(scale)
        results = list(compiled(args))
        square = results.pop() if norm else None
        flags = results.pop()
        if not scaler.used:
            scaler.note_unused(flags)
        if crosses:
            narrow.leave(results, scale, scaled_outside)
        if len(covered) < len(flagged):
            flags = None if known(flags) is False else _of_each(flags, covered, results)
        owners = partial(owner_references, len(results), flagged)
        scaler.graphs.record(owners, flags, [results[at] for at in flagged], square, dense)
        explain_double_backward()
        return results

    return takes_list(run)


def _of_each(flags: Tensor, covered: Sequence[Sequence[int]], results: Sequence[Any]) -> Tensor:
    """Return a flag for each gradient, bool; reads those gradients that share a flag that is set."""
    return torch.tensor(
        [
            flag and (len(every) == 1 or not bool(results[at].isfinite().all()))
            for flag, every in zip(flags.tolist(), covered, strict=True)
            for at in every
        ],
        device="cpu",
    )


def _check(gm: GraphModule) -> str:
    """Return the cheapest way to check this graph; see the pass."""
    values = (node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))
    devices = {value.device.type for value in values if isinstance(value, Tensor)}
    return "kernel" if "cuda" in devices else "shared" if devices == {"cpu"} else "ops"
