"""Lower the rewritten graph: by Inductor, by AOTAutograd alone, or eagerly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch.fx import GraphModule

from fxamp.backend.autocast_off import compiled_without_autocast, no_autocast
from fxamp.backend.backward_rules import BackwardRules
from fxamp.backend.kept_rules import KeptRules
from fxamp.backend.options import Options
from fxamp.backend.partition import list_partition
from fxamp.backend.scaled import Scaling, boxed, uncached
from fxamp.backend.scaled_eager import scale_eagerly
from fxamp.backend.unused_results import asking_for_none, by_used_results
from fxamp.capture import Captured
from fxamp.graph import fake_mode_of, fake_tensors
from fxamp.lowerings import mode_settings
from fxamp.passes.base import CastContext
from fxamp.passes.forward.scale_products import scaled_products
from fxamp.passes.sequences import backward as backward_passes
from fxamp.pipeline import run_passes
from fxamp.pipeline.dumps import Stages
from fxamp.torch_private import keep_saved_tensors

#: Compiles one of AOTAutograd's graphs for its example inputs.
InnerCompiler = Callable[[GraphModule, Sequence[Any]], Any]


@dataclass(frozen=True)
class Compilation:
    """Per-graph state beyond the user's options.

    ``device``: autocast is off for it, because the graph's casts are explicit. ``scaling``: how the backward is scaled,
    unscaled and checked; None: it is not. ``stages`` receives the graph of each stage. ``rules``: the policy's rules
    for the backward. ``kept``: its rules for kept values. ``unused``: compile the backward without the gradients of
    unused results.
    """

    device: str | None
    scaling: Scaling | None
    stages: Stages
    rules: BackwardRules | None = None
    kept: KeptRules | None = None
    unused: bool = False

    @property
    def hooked(self) -> bool:
        """Whether fxamp must rewrite AOTAutograd's graphs."""
        return any((self.scaling, self.rules, self.kept)) or self.stages.kept or self.unused

    def compile(self, gm: GraphModule, inputs: Sequence[Any], backward: bool, compiler: InnerCompiler) -> Any:
        """Compile one of AOTAutograd's graphs with ``compiler``; a backward first gets its casts and its scaling."""
        stage = "backward" if backward else "forward"

        def inner(graph: GraphModule, examples: Sequence[Any]) -> Any:
            kept = () if self.kept is None else tuple(self.kept.values)
            self.stages.graph(stage, lambda: list_partition(graph, stage, kept))
            compiled = compiler(graph, examples)
            if getattr(compiled, "source_code", None):
                self.stages.text(f"{stage}_kernels", lambda: compiled.source_code)
            return compiled

        def compile_backward(graph: GraphModule, examples: Sequence[Any]) -> Any:
            self._rewrite_backward(graph)
            return self.scaling.compile_backward(graph, examples, inner) if self.scaling else inner(graph, examples)

        if self.scaling is not None:
            keep_saved_tensors() if backward else self.scaling.mark_forward()
        if not backward:
            return inner(gm, inputs)
        return by_used_results(gm, inputs, compile_backward) if self.unused else compile_backward(gm, inputs)

    def _rewrite_backward(self, gm: GraphModule) -> None:
        values = (value for node in gm.graph.nodes for value in fake_tensors(node.meta.get("val")))
        mode = next((fake_mode_of(value) for value in values), None)
        owner = self.rules or self.scaling
        if mode is None or owner is None:
            return
        scale = self.scaling.backward_pass(gm) if self.scaling is not None else None
        passes = backward_passes(rules=self.rules is not None, scale=scale)
        run_passes(Captured(gm, mode), CastContext(mode, owner.policy), passes)
        if self.rules is not None:
            self.rules.log_unmatched(gm)


def lower_graph(gm: GraphModule, inputs: Sequence[Any], options: Options, run: Compilation) -> Callable[..., Any]:
    """Compile ``gm`` with the lowering that ``options`` name, and return a callable."""
    with compiled_without_autocast(run.device):
        compiled = _LOWERINGS[options.lowering](gm, inputs, options, run)
    return asking_for_none(compiled) if run.unused and options.lowering != "eager" else compiled


def _inductor(gm: GraphModule, inputs: Sequence[Any], options: Options, run: Compilation) -> Callable[..., Any]:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    patches = {**mode_settings(options.mode), **options.inductor}
    if run.kept is not None:
        from fxamp.backend.kept_partitioner import KeptPartitioner

        patches["custom_partitioner_fn"] = KeptPartitioner(run.kept)
    if not run.hooked and not scaled_products(gm):
        return cast(Callable[..., Any], compile_fx(gm, list(inputs), config_patches=patches))

    # A backward may be compiled only when it first runs, outside compile_fx.
    patched = config.patch(patches)

    def inner_compile(graph: GraphModule, examples: Sequence[Any], **kwargs: Any) -> Any:
        backward = bool(kwargs.get("is_backward"))
        return run.compile(graph, examples, backward, patched(lambda g, e: compile_fx_inner(g, e, **kwargs)))

    with uncached():
        compiled = compile_fx(gm, list(inputs), inner_compile=inner_compile, config_patches=patches)
    return cast(Callable[..., Any], compiled)


def _aot_eager(gm: GraphModule, inputs: Sequence[Any], options: Options, run: Compilation) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiler(graph: GraphModule, examples: Sequence[Any], backward: bool = False) -> Any:
        return run.compile(graph, examples, backward, lambda rewritten, _: boxed(rewritten))

    lowered = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=partial(compiler, backward=True),
        partition_fn=min_cut_rematerialization_partition if run.kept is None else run.kept.partition,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = lowered(gm, list(inputs))
    return compiled


def _eager(gm: GraphModule, inputs: Sequence[Any], options: Options, run: Compilation) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with no_autocast(run.device):
            return gm(*args)

    return call if run.scaling is None else scale_eagerly(call, gm, run.scaling.scaler)


_LOWERINGS: dict[str, Callable[[GraphModule, Sequence[Any], Options, Compilation], Callable[..., Any]]] = {
    "inductor": _inductor,
    "aot_eager": _aot_eager,
    "eager": _eager,
}
