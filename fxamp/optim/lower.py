"""From a step's graph to something that runs: unscaling folded in, every update guarded, then compiled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxamp.capture import Captured
from fxamp.kernels.dispatch import Implementation, implementation
from fxamp.lowerings import mode_settings
from fxamp.observe import CompiledStep, observed
from fxamp.optim.trace import Traced
from fxamp.passes.base import Context, PassSequence
from fxamp.passes.sequences import step
from fxamp.passes.step.fold_unscale import COEFFICIENT, GRADIENT, INVERSE
from fxamp.passes.step.guard_updates import FLAG
from fxamp.passes.step.lift_scalars import reads_on_host
from fxamp.pipeline import run_passes
from fxamp.pipeline.dumps import stages_by_environment
from fxamp.pipeline.list_graph import list_graph


@dataclass(frozen=True)
class StepOptions:
    """How one step is compiled, and what its graph does besides the step.

    ``scaled``: gradients hold the scale; ``clipped``: a clip coefficient is given; ``guarded``: a flag decides.
    ``lowering``: one of :data:`fxamp.lowerings.STEP_LOWERINGS`; ``mode``: one of Inductor's modes, or None.
    """

    scaled: bool = False
    clipped: bool = False
    guarded: bool = True
    lowering: str = "inductor"
    mode: str | None = None


def decompositions(options: StepOptions, kernel_on: torch.device | None = None) -> dict[Any, Any]:
    """What the trace is to decompose: what Inductor wants decomposed, or nothing, so that eager's own kernels run.

    ``kernel_on``: where a kernel may be generated for it, which takes the ops as they are.
    """
    if options.lowering == "aot_eager" or (kernel_on is not None and generates(kernel_on)):
        return {}
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


@dataclass(frozen=True, eq=False)
class Lowered:
    """A step that runs. ``source`` is the module that Inductor generated, None where it did not.

    ``lowered(tensors, floats, extras)`` writes to ``tensors`` in place; ``extras`` are the factors and the flag.
    """

    compiled: Callable[..., Any]
    traced: Traced
    numbers: "Numbers | None" = None
    source: str | None = None

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor], floats: Sequence[float], extras: Sequence[Tensor]) -> None:
        given = self.traced.inputs(floats)
        with observed(CompiledStep(self.source)):
            self.compiled(*tensors, *(given if self.numbers is None else [self.numbers.on_device(given)]), *extras)


@dataclass(frozen=True, eq=False)
class WholeStep:
    """A step of some parameters, compiled as a whole. ``places``: where its tensors are among those of the layout."""

    lowered: Lowered
    places: tuple[int, ...]

    def serves(self, floats: Sequence[float]) -> bool:
        """Whether the program is that of these settings."""
        return self.lowered.traced.serves(floats)

    def __call__(self, tensors: Sequence[Tensor], floats: Sequence[float], extras: Sequence[Tensor]) -> None:
        self.lowered([tensors[place] for place in self.places], floats, extras)


def generates(device: torch.device) -> bool:
    """Whether steps on the device are generated Triton kernels."""
    return implementation(device) in (Implementation.TRITON, Implementation.INTERPRETER)


def lower_step(traced: Traced, options: StepOptions) -> Lowered:
    """Rewrite the graph and compile it."""
    gm = traced.module
    lift = must_lift(gm, options)
    run_passes(Captured(gm, traced.mode), Context(traced.mode), step_passes(options, lift))
    stages = stages_by_environment()
    stages.graph("optimizer", lambda: list_graph(gm, stage="optimizer"))
    device = next(iter(gm.graph.nodes)).meta["val"].device
    numbers = Numbers(device) if lift and traced.symbols else None
    if options.lowering == "aot_eager":
        return Lowered(gm, traced, numbers)
    compiled, source = by_inductor(gm, traced, options)
    if source is not None:
        stages.text("optimizer_kernels", lambda: source)
    return Lowered(compiled, traced, numbers, source)


def step_passes(
    options: StepOptions, lift: bool, kind: bool = False, for_kernel: bool = False
) -> PassSequence[Context]:
    """The passes over a step's graph. ``kind``: it is that of one flat parameter; ``for_kernel``: for a kernel."""
    return step(
        flat=kind,
        lifted=lift,
        scaled=options.scaled,
        clipped=options.clipped,
        guarded=options.guarded,
        for_inductor=options.lowering == "inductor" and not for_kernel,
    )


def must_lift(gm: GraphModule, options: StepOptions) -> bool:
    """Whether the graph's symbolic floats have to become tensors: for Inductor, and where it reads one on the host."""
    return options.lowering == "inductor" or reads_on_host(gm)


def by_inductor(gm: GraphModule, traced: Traced, options: StepOptions) -> tuple[Callable[..., Any], str | None]:
    """The compiled graph, and the text that was generated for it."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    patches = mode_settings(options.mode)
    # Every parameter's kernel reads the same few scalars: each of them is no reason to try merging it with all others.
    patches["max_fusion_buffer_group_pairwise_attempts"] = 8
    # Parameters of different shapes are updated by one launch, not by one for each shape.
    patches |= {"combo_kernels": True} if inputs[0].is_cuda else {}
    with config.patch(patches), tracing(TracingContext(traced.mode)), torch.no_grad():
        graphs = bool(config.triton.cudagraphs) and inputs[0].is_cuda
        compiled = compile_fx_inner(
            gm,
            inputs,
            static_input_idxs=_static(gm) if graphs else (),
            cudagraphs=BoxedBool(graphs),
            is_inference=True,
        )
    return lambda *args: compiled(list(args)), getattr(compiled, "source_code", None) or None


def _static(gm: GraphModule) -> tuple[int, ...]:
    """Inputs that keep their addresses from step to step: all but gradients, factors and the flag."""
    moving = (FLAG, INVERSE, COEFFICIENT)
    inputs = enumerate(gm.graph.find_nodes(op="placeholder"))
    return tuple(at for at, node in inputs if GRADIENT not in node.meta and node.target not in moving)


class Numbers:
    """The settings' floats as one float64 tensor on the device, sent there when one of them has moved."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: tuple[float, ...] = ()
        self._tensor = torch.empty(0)

    def on_device(self, floats: Sequence[float]) -> Tensor:
        given = tuple(floats)
        if given != self._sent or self._tensor.numel() != len(given):
            host = torch.tensor(given, dtype=torch.float64, pin_memory=self._device.type == "cuda")
            if self._tensor.numel() == len(given):
                self._tensor.copy_(host, non_blocking=True)
            else:
                self._tensor = host.to(self._device, non_blocking=True)
            self._sent = given
        return self._tensor
