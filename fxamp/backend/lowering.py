"""Lower the rewritten graph: by Inductor, by AOTAutograd alone, or eagerly."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch.fx import GraphModule

from fxamp.backend.autocast_off import compiled_without_autocast, no_autocast
from fxamp.backend.backward_rules import BackwardRules
from fxamp.backend.cache_key import cache_key, keyed
from fxamp.backend.eager_checkpoints import keep_random_numbers
from fxamp.backend.kept_rules import KeptRules
from fxamp.backend.options import Options
from fxamp.backend.partition import list_partition
from fxamp.backend.unused_results import asking_for_none, by_used_results
from fxamp.capture import Captured
from fxamp.errors import MachineError
from fxamp.graph import fake_mode_of, fake_tensors
from fxamp.lowerings import mode_settings
from fxamp.passes.base import CastContext
from fxamp.passes.sequences import backward as backward_passes
from fxamp.pipeline import run_passes
from fxamp.policy import Policy
from fxamp.reports.dumps import Stages
from fxamp.scaler.graphs.scaled_backward import Scaling, boxed
from fxamp.scaler.outside_graphs.eager_region import scale_eagerly
from fxamp.torch_private import is_cacheable, is_dynamic, keep_saved_tensors, stores_backwards

#: Compiles one of AOTAutograd's graphs for its example inputs.
InnerCompiler = Callable[[GraphModule, Sequence[Any]], Any]


@dataclass(frozen=True)
class Compilation:
    """Per-graph state beyond the user's options.

    ``policy``: autocast is off for its device, because the graph's casts are explicit. ``scaling``: how the backward is
    scaled, unscaled and checked; None: it is not. ``stages`` receives the graph of each stage. ``rules``: the policy's
    rules for the backward. ``kept``: its rules for kept values. ``unused``: compile the backward without the gradients
    of unused results.
    """

    policy: Policy | None
    scaling: Scaling | None
    stages: Stages
    rules: BackwardRules | None = None
    kept: KeptRules | None = None
    unused: bool = False

    @property
    def device(self) -> str | None:
        """The device type that autocast is off for."""
        return None if self.policy is None else self.policy.device

    @property
    def in_8_bits(self) -> bool:
        """Whether the policy converts values of the backward from or to 8 bits."""
        return self.kept is not None or (self.policy is not None and self.policy.has_fp8)

    def hooked(self, inputs: Sequence[Any]) -> bool:
        """Whether fxamp rewrites AOTAutograd's graphs: it must, or passes for all backwards can make them lighter.

        The latter is so where sizes are fixed, on every device but the CPU.
        """
        must = any((self.scaling, self.rules, self.kept)) or self.stages.kept or self.unused
        return must or (self.device not in (None, "cpu") and not any(map(is_dynamic, inputs)))

    def stored(self, gm: GraphModule, inputs: Sequence[Any]) -> bool:
        """Whether AOTAutograd's cache may store what becomes of ``gm``: no dump is asked for, no size is dynamic."""
        return not any(map(is_dynamic, inputs)) and not self.stages.kept and stores_backwards() and is_cacheable(gm)

    def key(self, gm: GraphModule) -> str:
        """Return what the keys of torch's caches must contain for ``gm``."""
        if self.policy is None:
            return ""
        scaled = None if self.scaling is None else self.scaling.scaler.graph_norm
        return cache_key(gm, self.policy, ("scaled", scaled), ("unused", self.unused))

    def compile(self, gm: GraphModule, inputs: Sequence[Any], backward: bool, compiler: InnerCompiler) -> Any:
        """Compile one of AOTAutograd's graphs with ``compiler``; a backward first gets its casts and its scaling."""
        if self.scaling is not None:
            keep_saved_tensors() if backward else self.scaling.mark_forward()
        if not backward:
            return self._lower(gm, inputs, "forward", compiler)
        if self.unused:
            return self.compile_later(gm, inputs, compiler)
        return self._compile_backward(compiler, gm, inputs)

    def compile_later(
        self, gm: GraphModule, inputs: Sequence[Any], compiler: InnerCompiler
    ) -> Callable[[list[Any]], Any]:
        """Return a callable that compiles the backward ``gm`` when it first runs."""
        return by_used_results(gm, inputs, partial(self._compile_backward, compiler))

    def _compile_backward(self, compiler: InnerCompiler, gm: GraphModule, inputs: Sequence[Any]) -> Any:
        def lower(graph: GraphModule, examples: Sequence[Any]) -> Any:
            return self._lower(graph, examples, "backward", compiler)

        self._rewrite_backward(gm)
        return self.scaling.compile_backward(gm, inputs, lower) if self.scaling else lower(gm, inputs)

    def _lower(self, gm: GraphModule, inputs: Sequence[Any], stage: str, compiler: InnerCompiler) -> Any:
        kept = () if self.kept is None else tuple(self.kept.values)
        self.stages.graph(stage, lambda: list_partition(gm, stage, kept))
        compiled = compiler(gm, inputs)
        if getattr(compiled, "source_code", None):
            self.stages.text(f"{stage}_kernels", lambda: compiled.source_code)
        return compiled

    def _rewrite_backward(self, gm: GraphModule) -> None:
        values = (value for node in gm.graph.nodes for value in fake_tensors(node.meta.get("val")))
        mode = next((fake_mode_of(value) for value in values), None)
        if mode is None or self.policy is None:
            return
        scale = self.scaling.backward_pass(gm) if self.scaling is not None else None
        passes = backward_passes(rules=self.rules is not None, scale=scale)
        run_passes(Captured(gm, mode), CastContext(mode, self.policy), passes)
        if self.rules is not None:
            self.rules.log_unmatched(gm)


def lower_graph(gm: GraphModule, inputs: Sequence[Any], options: Options, run: Compilation) -> Callable[..., Any]:
    """Compile ``gm`` with the lowering that ``options`` name, and return a callable."""
    with compiled_without_autocast(run.device), _compiler_found():
        compiled = _LOWERINGS[options.lowering](gm, inputs, options, run)
    return asking_for_none(compiled) if run.unused and options.lowering != "eager" else compiled


@contextmanager
def _compiler_found() -> Iterator[None]:
    """Raise MachineError where Inductor finds no C++ compiler, which it needs for CPUs."""
    try:
        yield
    except Exception as error:
        if "InvalidCxxCompiler" not in (type(error).__name__, *str(error).partition(":")[:1]):
            raise
        raise MachineError(
            "Inductor finds no working C++ compiler, which it needs for a CPU; accepted: install g++ or clang++, name "
            "one in the environment variable CXX, or pass options={'lowering': 'aot_eager'}, which needs none"
        ) from error


def _inductor(gm: GraphModule, inputs: Sequence[Any], options: Options, run: Compilation) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    patches = {**mode_settings(options.mode), **options.inductor}
    if run.kept is not None:
        from fxamp.backend.kept_partitioner import KeptPartitioner

        patches["custom_partitioner_fn"] = KeptPartitioner(run.kept)
    compiled = partial(compile_fx, gm, list(inputs), config_patches=patches)
    key = run.key(gm)
    with keyed(key):
        if run.hooked(inputs):
            from fxamp.backend.inductor import hooks

            inner, caching = hooks(run, key, patches, run.stored(gm, inputs))
            with caching:
                return cast(Callable[..., Any], compiled(inner_compile=inner))
        return cast(Callable[..., Any], compiled())


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

    compiled = call if run.scaling is None else scale_eagerly(call, gm, run.scaling.scaler)
    keep_random_numbers(gm)
    return compiled


_LOWERINGS: dict[str, Callable[[GraphModule, Sequence[Any], Options, Compilation], Callable[..., Any]]] = {
    "inductor": _inductor,
    "aot_eager": _aot_eager,
    "eager": _eager,
}
