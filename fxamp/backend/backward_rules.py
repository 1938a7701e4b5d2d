"""Apply a policy's rules for the backward to the graph that AOTAutograd derives and partitions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from fxamp.passes.backward.cast_backward import CastBackward
from fxamp.passes.shared.decision import decision
from fxamp.pipeline import run_traced
from fxamp.pipeline.participant import Boxed, GraphCompiler, Participant, refuse_eager
from fxamp.policy import Policy
from fxamp.reports.warnings import warn_unmatched


@dataclass(frozen=True)
class BackwardRules(Participant):
    """A policy with rules for the backward."""

    policy: Policy

    @property
    def needs_backward(self) -> str:
        ids = ", ".join(repr(rule.id) for rule in self.policy.rules if rule.region in ("backward", "both"))
        return f"policy {self.policy.name!r} has rules for the backward ({ids})"

    def refuse(self, lowering: str, inductor: Mapping[str, Any]) -> None:
        refuse_eager(self.needs_backward, lowering)
        super().refuse(lowering, inductor)

    def backward(self, compiler: GraphCompiler) -> GraphCompiler:
        def compile_cast(gm: GraphModule, inputs: Sequence[Any]) -> Boxed:
            run_traced(gm, self.policy, CastBackward())
            used = {ruled.rule.id for node in gm.graph.nodes if (ruled := decision(node)) is not None and ruled.rule}
            warn_unmatched(self.policy, used, "no op of a backward graph", "backward")
            return compiler(gm, inputs)

        return compile_cast
