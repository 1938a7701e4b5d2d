"""Lower a step's graph: fold in unscaling, guard every update, then compile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxamp.capture import Captured
from fxamp.graph import is_random
from fxamp.kernels.dispatch import Implementation, implementation
from fxamp.optim.errors import NotCompilableError
from fxamp.optim.precision.state_precision import Precision
from fxamp.optim.tracing.trace import Traced
from fxamp.passes.base import Context, Pass
from fxamp.passes.sequences import step
from fxamp.passes.step.drop_copies import COPIES
from fxamp.passes.step.lift_scalars import reads_on_host
from fxamp.pipeline import run_passes
from fxamp.pipeline.cache_key import keyed, source_digest
from fxamp.reports.dumps import Stages, stages_by_environment
from fxamp.reports.list_graph import list_graph
from fxamp.torch_devices import copy_across_, moved
from fxamp.torch_private import compiling_flag, order_writes


class StepOptions(NamedTuple):
    """How one step is compiled, and what its graph does besides the step.

    ``scaled``: gradients are scaled. ``clipped``: a clip coefficient is given. ``guarded``: a flag can skip the step.
    ``lowering``: one of :data:`fxamp.lowering_names.STEP_LOWERINGS`. ``precision``: the precision of the state; None:
    as the optimizer creates it.
    """

    scaled: bool = False
    clipped: bool = False
    guarded: bool = True
    lowering: str = "inductor"
    precision: Precision | None = None


def decompositions(options: StepOptions) -> dict[Any, Any]:
    """Return the trace's decompositions: Inductor's, or none, so that eager's own kernels run."""
    if options.lowering == "aot_eager":
        return {}
    from fxamp.torch_private.parts.inductor import select_decomp_table

    return dict(select_decomp_table())


@dataclass(frozen=True, eq=False)
class WholeStep:
    """The step of some parameters, compiled as one program.

    ``places``: indices of its tensors among the layout's. ``source``: the module that Inductor generated, None for
    other lowerings.
    """

    compiled: Callable[..., Any]
    traced: Traced
    places: tuple[int, ...]
    numbers: "Numbers | None" = None
    source: str | None = None
    launches: ClassVar[bool] = False

    def serves(self, floats: Sequence[float]) -> bool:
        """Whether the program is valid for these settings."""
        return self.traced.serves(floats)

    @torch.no_grad()
    def __call__(
        self, tensors: Sequence[Tensor], floats: Sequence[float], extras: Sequence[Tensor], _: list[int] | None = None
    ) -> None:
        """Write to the layout's ``tensors`` in place; ``extras`` are the factors and the flag."""
        inputs: list[Any] = self.traced.inputs(floats)
        if self.numbers is not None:
            inputs = [self.numbers.on_device(inputs)]
        self.compiled(*(tensors[place] for place in self.places), *inputs, *extras)


def generates(device: torch.device) -> bool:
    """Whether steps on the device run as generated Triton kernels."""
    return implementation(device) in (Implementation.TRITON, Implementation.INTERPRETER)


def device_of(gm: GraphModule) -> torch.device:
    """Return the device of a step's parameters, its graph's first inputs."""
    device: torch.device = next(iter(gm.graph.nodes)).meta["val"].device
    return device


def lower_step(traced: Traced, options: StepOptions, places: Sequence[int]) -> WholeStep:
    """Rewrite the graph and compile it; ``places``: see :class:`WholeStep`."""
    gm = traced.module
    lift = must_lift(gm, options)
    passes = step(options, lifted=lift, for_inductor=options.lowering == "inductor")
    stages = rewrite_step(traced, passes)
    numbers = Numbers(device_of(gm)) if lift and traced.symbols else None
    if options.lowering == "aot_eager":
        return WholeStep(gm, traced, tuple(places), numbers)
    compiled, source = by_inductor(gm, traced)
    if source is not None:
        stages.text("optimizer_kernels", lambda: source)
    return WholeStep(compiled, traced, tuple(places), numbers, source)


def rewrite_step(traced: Traced, passes: Sequence[Pass[Context]]) -> Stages:
    """Run the passes on the graph of a step; return where its stages are dumped, as the environment says."""
    gm = traced.module
    run_passes(Captured(gm, traced.mode), Context(traced.mode), *passes)
    stages = stages_by_environment()
    stages.graph("optimizer", lambda: list_graph(gm, stage="optimizer"))
    return stages


def must_lift(gm: GraphModule, options: StepOptions) -> bool:
    """Whether symbolic floats must become tensors: for Inductor, or if the graph reads a tensor on the host."""
    return options.lowering == "inductor" or reads_on_host(gm)


def by_inductor(gm: GraphModule, traced: Traced) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled graph, and its generated source code; raise NotCompilableError if Inductor cannot do it."""
    if any(map(is_random, gm.graph.nodes)):
        raise NotCompilableError("its step draws random numbers")
    from torch._inductor import config

    from fxamp.torch_private.parts.fx import TracingContext, tracing
    from fxamp.torch_private.parts.inductor import BoxedBool, InductorError, compile_fx

    order_writes()
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    # The kernels of all parameters read the same few scalars, so without a limit Inductor would try to fuse every pair.
    patches: dict[str, Any] = {"max_fusion_buffer_group_pairwise_attempts": 8}
    # One launch updates parameters of different shapes, instead of one launch per shape.
    patches |= {"combo_kernels": True} if inputs[0].is_cuda else {}
    # Its patterns drop copies, even those that hold an input's value from before the step writes to it.
    patches |= {"pattern_matcher": False} if any(node.target in COPIES for node in gm.graph.nodes) else {}
    with (
        compiling_flag(everywhere=True),
        config.patch(patches),
        keyed(f"fxamp {source_digest()}"),
        tracing(TracingContext(traced.mode)),
        torch.no_grad(),
    ):
        try:
            compiled = compile_fx.compile_fx_inner(gm, inputs, cudagraphs=BoxedBool(False), is_inference=True)
        except InductorError as error:
            raise NotCompilableError(f"Inductor cannot compile it: {str(error).splitlines()[0]}") from error
    return lambda *args: compiled(list(args)), getattr(compiled, "source_code", None) or None


class Numbers:
    """The settings' floats as one float64 tensor on the device; copied there when one of them changes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: tuple[float, ...] = ()
        self._tensor = torch.empty(0, device="cpu")

    def on_device(self, floats: Sequence[float]) -> Tensor:
        """Return the tensor of floats, without a host sync."""
        values = tuple(floats)
        if values != self._sent or self._tensor.numel() != len(values):
            pinned = self._device.type == "cuda"
            host = torch.tensor(values, dtype=torch.float64, device="cpu", pin_memory=pinned)
            if self._tensor.numel() == len(values):
                copy_across_(self._tensor, host)
            else:
                self._tensor = moved(host, self._device)
            self._sent = values
        return self._tensor
