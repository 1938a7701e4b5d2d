"""The participants of a graph, which work on it besides its casts, and the one place that calls them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from fxamp.backend.backward_rules import BackwardRules
from fxamp.backend.backward_steps import BackwardSteps
from fxamp.backend.keep_rules import KeepRules
from fxamp.backend.options import Options
from fxamp.backend.unused_results import UnusedResults, may_be_unused
from fxamp.backend.valueless_results import ValuelessResults
from fxamp.capture import Captured
from fxamp.graph import mode_of, need_gradients
from fxamp.graph_text import KeptValue, Listing
from fxamp.lowering_names import mode_settings
from fxamp.nonfinite.monitor import Monitor
from fxamp.nonfinite.participant import Watching
from fxamp.passes.base import Context
from fxamp.passes.partition.mark_overwritten import MarkOverwritten
from fxamp.passes.sequences import BACKWARD, PARTITIONED_FORWARD
from fxamp.pipeline import run_passes, run_traced
from fxamp.pipeline.cache_key import cache_key
from fxamp.pipeline.participant import Boxed, GraphCompiler, Participant, Partitioner, needing_backward
from fxamp.policy import Policy
from fxamp.policy.model.site import KEPT, RESULTS
from fxamp.reports.nonfinite import NonFinite
from fxamp.reports.observer import GraphObserver
from fxamp.scaler.graphs.scaled_backward import Scaling


@dataclass(frozen=True)
class Participants:
    """The participants of one graph; the first of ``members`` wraps the others.

    ``policy``: the policy of the graph's casts; None if it has none. ``observer`` sees AOTAutograd's graphs after the
    participants. All of them live as long as the compiled graph, whose backward may be compiled late, so they hold no
    graph and no inputs.
    """

    policy: Policy | None
    options: Options
    observer: GraphObserver
    members: tuple[Participant, ...]

    @property
    def device(self) -> str | None:
        """The device type that autocast is off for, because the graph's casts are explicit."""
        return None if self.policy is None else self.policy.device

    @property
    def kept(self) -> tuple[KeptValue, ...]:
        """How rules store the values that the forward saves for the backward."""
        return tuple(value for member in self.members for value in member.kept)

    @property
    def found(self) -> Callable[[], tuple[NonFinite, ...]] | None:
        """Reads the non-finite values that runs reported; None without the option "nonfinite"."""
        return next((member.monitor.found for member in self.members if isinstance(member, Watching)), None)

    def key(self, gm: GraphModule) -> str:
        """Return what the keys of torch's caches must contain for ``gm``."""
        return cache_key(gm, self.policy, [(type(member).__name__, member.key) for member in self.members])

    def with_late_backward(self) -> "Participants":
        """Return the same with a backward that is compiled when it first runs, as a stored one must be."""
        late = any(isinstance(member, UnusedResults) for member in self.members)
        if late or self.policy is None:
            return self
        return replace(self, members=(UnusedResults(self.policy, expected=False, overwrites=True), *self.members))

    def captured(self, graph: Captured, inputs: Sequence[Any], listing: Listing) -> None:
        """Change the captured graph with its casts, for ``inputs``; ``listing`` describes the graph."""
        for member in self.members:
            member.captured(graph, inputs, listing)

    def partition(self, partitioner: Partitioner, inputs: Sequence[Any]) -> Partitioner:
        """Return ``partitioner`` with the participants' changes, and what every graph needs that trains an input."""
        for member in reversed(self.members):
            partitioner = member.partition(partitioner, self.options.lowering)
        trains = need_gradients(inputs) and torch.is_grad_enabled()
        return saving_overwritten(partitioner) if trains else partitioner

    def forward(self, compiler: GraphCompiler) -> GraphCompiler:
        """Return the compiler for the forward, which calls ``compiler`` after the changes."""
        compiler = self._observed("forward", compiler)
        for member in reversed(self.members):
            compiler = member.forward(compiler)
        return needing_backward(compiler, self.members)

    def backward(self, compiler: GraphCompiler) -> GraphCompiler:
        """Return the compiler for the derived or stored backward, which calls ``compiler`` after the changes."""
        compiler = self._observed("backward", compiler)
        for member in reversed(self.members):
            compiler = member.backward(compiler)

        def compile_read(gm: GraphModule, inputs: Sequence[Any]) -> Boxed:
            for member in self.members:
                member.read_backward(gm, self.options.lowering)
            return compiler(gm, inputs)

        return compile_read

    def run(self, run: Callable[..., Any], gm: GraphModule) -> Callable[..., Any]:
        """Return the callable for the program; ``run`` runs ``gm``."""
        for member in reversed(self.members):
            run = member.run(run, gm, self.options.lowering)
        return run

    def _observed(self, stage: str, compiler: GraphCompiler) -> GraphCompiler:
        """Return ``compiler``, after the last passes over the graph."""

        def compile_observed(gm: GraphModule, inputs: Sequence[Any]) -> Boxed:
            if self.policy is not None:
                run_traced(gm, self.policy, *(BACKWARD if stage == "backward" else PARTITIONED_FORWARD))
            self.observer.partitioned(stage, gm, self.kept)
            compiled = compiler(gm, inputs)
            self.observer.compiled(stage, compiled)
            return compiled

        return compile_observed


def saving_overwritten(partitioner: Partitioner) -> Partitioner:
    """Return ``partitioner`` such that it saves what the forward computes from inputs that it writes to."""

    def partition(gm: GraphModule, inputs: Sequence[Any], **settings: Any) -> tuple[GraphModule, GraphModule]:
        mode = mode_of(gm)
        if mode is not None:
            run_passes(Captured(gm, mode), Context(mode), MarkOverwritten())
        return partitioner(gm, inputs, **settings)

    return partition


def participants_of(
    policy: Policy | None, options: Options, observer: GraphObserver, gm: GraphModule, ended: str
) -> Participants:
    """Return the participants for Dynamo's graph ``gm``.

    ``ended``: the reason for the graph break that ended it, if there was one. Raises OptionError if one refuses the
    options.
    """
    members = [] if policy is None else _of_policy(policy, options, gm, ended)
    if options.nonfinite is not None:
        monitor = Monitor(options.nonfinite, options.scaler is not None)
        members.append(Watching(monitor, options.lowering, bool(ended)))
        if options.scaler is not None:
            options.scaler.graphs.monitors[id(monitor)] = monitor
    for member in members:
        member.refuse(options.lowering, {**mode_settings(options.mode), **options.inductor})
    return Participants(policy, options, observer, tuple(members))


def _of_policy(policy: Policy, options: Options, gm: GraphModule, ended: str) -> list[Participant]:
    """Return the participants of a graph with a policy."""
    members: list[Participant] = [ValuelessResults()] if policy.has_rules_for(RESULTS) else []
    if policy.has_rules_for(KEPT):
        members.append(KeepRules(policy))
    if options.lowering != "eager" and (options.scaler is not None or not ended) and may_be_unused(gm):
        members.append(UnusedResults(policy, overwrites=options.lowering == "inductor"))
    if policy.has_rules_for("backward"):
        members.append(BackwardRules(policy))
    if options.scaler is not None:
        members.append(Scaling.of(options.scaler, policy, gm))
    if policy.optimizer is not None and policy.optimizer.in_backward:
        members.append(BackwardSteps(policy, scaled=options.scaler is not None))
    return members
