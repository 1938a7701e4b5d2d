"""The one place that calls those who take part in a graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from fxamp.graph_text import KeptValue
from fxamp.passes.sequences import BACKWARD, PARTITIONED_FORWARD
from fxamp.pipeline import run_traced
from fxamp.pipeline.cache_key import cache_key
from fxamp.pipeline.participant import Boxed, GraphCompiler, Participant, Partitioner
from fxamp.policy import Policy
from fxamp.reports.dumps import Stages
from fxamp.reports.list_graph import list_partition


@dataclass(frozen=True)
class Compilation:
    """The compilation of one graph: ``stages`` receives it after each stage, ``participants`` can change it.

    ``policy``: its casts are in the graph already; None: there are none, and no participants.
    """

    policy: Policy | None
    lowering: str
    stages: Stages
    participants: tuple[Participant, ...] = ()

    @property
    def device(self) -> str | None:
        """The device type that autocast is off for, because the graph's casts are explicit."""
        return None if self.policy is None else self.policy.device

    @property
    def kept(self) -> tuple[KeptValue, ...]:
        """What rules made of the values that the forward keeps for the backward."""
        return tuple(value for participant in self.participants for value in participant.kept)

    def key(self, gm: GraphModule) -> str:
        """Return what the keys of torch's caches must contain for ``gm``."""
        return cache_key(
            gm, self.policy, [(type(participant).__name__, participant.key) for participant in self.participants]
        )

    def partition(self, partitioner: Partitioner) -> Partitioner:
        """Return ``partitioner``, or what participants make of it."""
        for participant in reversed(self.participants):
            partitioner = participant.partition(partitioner, self.lowering)
        return partitioner

    def forward(self, compiler: GraphCompiler) -> GraphCompiler:
        """Return the compiler for the forward; ``compiler`` compiles it in the end."""
        compiler = self._shown("forward", compiler)
        for participant in reversed(self.participants):
            compiler = participant.forward(compiler)
        return compiler

    def backward(self, compiler: GraphCompiler) -> GraphCompiler:
        """Return the compiler for the backward, derived or stored; ``compiler`` compiles it in the end."""
        compiler = self._shown("backward", compiler)
        for participant in reversed(self.participants):
            compiler = participant.backward(compiler)

        def compile_read(gm: GraphModule, inputs: Sequence[Any]) -> Boxed:
            for participant in self.participants:
                participant.read_backward(gm, self.lowering)
            return compiler(gm, inputs)

        return compile_read

    def run(self, run: Callable[..., Any], gm: GraphModule) -> Callable[..., Any]:
        """Return what a program calls; ``run`` runs ``gm``."""
        for participant in reversed(self.participants):
            run = participant.run(run, gm, self.lowering)
        return run

    def _shown(self, stage: str, compiler: GraphCompiler) -> GraphCompiler:
        """Return ``compiler``, after the last passes over the graph; dumps get the graph, and its kernels' code."""

        def compile_shown(gm: GraphModule, inputs: Sequence[Any]) -> Boxed:
            if self.policy is not None:
                run_traced(gm, self.policy, BACKWARD if stage == "backward" else PARTITIONED_FORWARD)
            self.stages.graph(stage, lambda: list_partition(gm, stage, self.kept))
            compiled = compiler(gm, inputs)
            source = getattr(compiled, "source_code", None)
            if source:
                self.stages.text(f"{stage}_kernels", lambda: source)
            return compiled

        return compile_shown
