"""Apply a policy's rules with ``keep`` to AOTAutograd's partition of forward and backward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from fxamp.errors import OptionError
from fxamp.graph import graph_output, mode_of, tensor_value
from fxamp.graph_text import KeptValue
from fxamp.kernels.host_memory import await_copies_of
from fxamp.passes.partition.mark_recomputed import RECOMPUTED, MarkRecomputed
from fxamp.passes.partition.pack_kept import KEPT_VALUES, RESTORE, PackKept, kept_value
from fxamp.passes.partition.unpack_kept import UnpackKept
from fxamp.passes.shared.recomputed_jumps import mark_jumps
from fxamp.passes.shared.saved_values import mark_without_gradient, saved
from fxamp.pipeline import run_traced
from fxamp.pipeline.participant import (
    Boxed,
    GraphCompiler,
    Participant,
    Partitioner,
    refuse_compiled_autograd,
    refuse_eager,
    takes_list,
    uses_cuda_graphs,
)
from fxamp.policy import KeepRule, Policy
from fxamp.policy.model.keep_rule import Keep
from fxamp.policy.model.site import KEPT
from fxamp.reports.warnings import warn_unmatched
from fxamp.torch_private import inlines_saved_tensors_hooks

#: The devices of policies that may send values to the host; on a CPU values stay where they are.
_WITH_HOST = ("cuda", "cpu")


@dataclass(frozen=True)
class KeepRules(Participant):
    """A policy with rules for saved values; compiling a graph adds the outcome for each value to ``kept``.

    ``inspected``: the graph runs on the CPU, but must show what would happen on the policy's device.
    """

    policy: Policy
    inspected: bool = False
    kept: list[KeptValue] = field(default_factory=list)

    def refuse(self, lowering: str, inductor: Mapping[str, Any]) -> None:
        ids = ", ".join(repr(rule.id) for rule in self.policy.rules if rule.region == KEPT)
        what = f"policy {self.policy.name!r} has rules for what is kept for the backward ({ids})"
        refuse_eager(what, lowering)
        if "custom_partitioner_fn" in inductor:
            raise OptionError(
                f"{what}, and option 'inductor' sets custom_partitioner_fn; accepted: only one of them, since both "
                "partition"
            )
        refuse_compiled_autograd(what)
        self._refuse_host(inductor)

    def partition(self, partitioner: Partitioner, lowering: str) -> Partitioner:
        """Pack the values that the partition saves.

        The min cut uses the sizes before packing; with the packed sizes it saved the same bytes of GPT-2 and of a
        ResNet. Inductor chooses its own layouts; for other lowerings, unpacked values must have the originals' strides.
        """

        def partition(gm: GraphModule, inputs: Sequence[Any], **settings: Any) -> tuple[GraphModule, GraphModule]:
            results = settings["num_fwd_outputs"]
            mark_without_gradient(gm, results)
            run_traced(gm, self.policy, MarkRecomputed(results))
            forward, backward = partitioner(gm, inputs, **settings)
            if mode_of(gm) is not None:
                values = self._pack(forward, backward, results, strides=lowering != "inductor")
                graph_output(backward.graph).meta[KEPT_VALUES] = values
                self.kept.extend(values)
            return forward, backward

        return partition

    def read_backward(self, backward: GraphModule, lowering: str) -> None:
        if not self.kept:  # it comes from torch's cache
            self.kept.extend(graph_output(backward.graph).meta.get(KEPT_VALUES, ()))

    def run(self, run: Callable[..., Any], gm: GraphModule, lowering: str) -> Callable[..., Any]:
        """Log, once, each of the user's rules that matched no kept value."""
        used = {value.rule.id for value in self.kept if value.rule is not None}
        if self.kept:
            warn_unmatched(self.policy, used, "nothing that a compiled forward keeps", KEPT)
        return run

    def backward(self, compiler: GraphCompiler) -> GraphCompiler:
        def compile_awaiting(gm: GraphModule, inputs: Sequence[Any]) -> Boxed:
            takes = gm.graph.find_nodes(op="call_function", target=torch.ops.fxamp.take_from_host.default)
            devices = dict.fromkeys(node.args[1] for node in takes)
            compiled = compiler(gm, inputs)
            return _awaiting(compiled, list(devices)) if devices else compiled

        return compile_awaiting

    def _refuse_host(self, inductor: Mapping[str, Any]) -> None:
        """Raise OptionError if a rule asks for host memory and values cannot be stored there."""
        ids = ", ".join(
            repr(rule.id) for rule in self.policy.rules if isinstance(rule, KeepRule) and rule.keep is Keep.HOST
        )
        what = f"policy {self.policy.name!r} has rules with keep = 'host' ({ids})"
        if ids and self.policy.device not in _WITH_HOST:
            raise OptionError(
                f"{what}, for device {self.policy.device!r}; accepted: {', '.join(map(repr, _WITH_HOST))}"
            )
        if ids and uses_cuda_graphs(inductor):
            raise OptionError(f"{what}, whose copies CUDA graphs cannot capture; accepted: a mode without CUDA graphs")

    def _pack(self, forward: GraphModule, backward: GraphModule, results: int, strides: bool) -> list[KeptValue]:
        """Pack the values that ``forward`` returns to ``backward`` after its first ``results`` outputs, in place."""
        originals = tuple(saved(forward, results))
        mark_jumps(forward, backward, results)
        run_traced(forward, self.policy, PackKept(results, self.inspected))
        outcome = graph_output(forward.graph).meta
        sent = [plan for plan in outcome[RESTORE] if plan is not None and plan.packing.form is Keep.HOST]
        if sent and inlines_saved_tensors_hooks():
            raise OptionError(
                f"policy {self.policy.name!r} keeps values in host memory (keep = 'host'), and saved_tensors_hooks "
                "that are graphs are compiled into the forward, which would read them there before they are copied; "
                "accepted: hooks that are Python functions, or a policy without such rules"
            )
        unpack = UnpackKept(originals, outcome[RESTORE], tuple(saved(forward, results)), strides)
        run_traced(backward, self.policy, unpack)
        return [*outcome[KEPT_VALUES], *_recomputed(backward)]


def _awaiting(compiled: Boxed, devices: Sequence[torch.device]) -> Boxed:
    """Wrap ``compiled`` so that after a failure later work waits for its copies, whose memory may be reused."""

    def run(args: list[Any]) -> Any:
        try:
            return compiled(args)
        except BaseException:
            for device in devices:
                await_copies_of(device)
            raise

    return takes_list(run)


def _recomputed(backward: GraphModule) -> list[KeptValue]:
    """Return the values that the backward recomputes because of a rule; they use no memory between the two."""
    marked = [node for node in backward.graph.nodes if RECOMPUTED in node.meta and tensor_value(node) is not None]
    return [kept_value(node, node.name, node.meta[RECOMPUTED], "recompute", (0, 0)) for node in marked]
