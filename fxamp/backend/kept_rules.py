"""Apply a policy's rules for kept values to AOTAutograd's partition of forward and backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from fxamp.backend.options import Options
from fxamp.capture import Captured
from fxamp.errors import OptionError
from fxamp.graph import fake_mode_of, fake_tensors, graph_output, tensor_value
from fxamp.listing import KeptValue
from fxamp.passes.base import CastContext
from fxamp.passes.partition.mark_recomputed import RECOMPUTED
from fxamp.passes.partition.pack_kept import KEPT_VALUES, RESTORE, told
from fxamp.passes.partition.unpack_kept import UnpackKept
from fxamp.passes.sequences import joint, kept_backward, kept_forward
from fxamp.passes.shared.saved_values import saved
from fxamp.pipeline import run_passes
from fxamp.policy import Policy
from fxamp.policy.model.keep import KEPT
from fxamp.reports.record import unmatched_rules
from fxamp.reports.warnings import warn_unmatched

#: Splits a joint graph into a forward and a backward.
Partitioner = Callable[..., tuple[GraphModule, GraphModule]]


@dataclass(frozen=True)
class KeptRules:
    """A policy with rules for kept values; ``values`` fills with the outcome for each value as graphs are compiled."""

    policy: Policy
    values: list[KeptValue] = field(default_factory=list)

    def partition(
        self, gm: GraphModule, inputs: Sequence[Any], *, strides: bool = True, **given: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Partition the joint graph ``gm`` with torch's min-cut, and pack the values that it keeps.

        ``strides``: whether unpacked values must have those of the originals. The cut is priced at the sizes before
        packing: at those after it, it kept the same bytes of GPT-2 and of a ResNet.
        """
        from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut

        results = given["num_fwd_outputs"]
        mode = _mode_of(gm)
        if mode is None:
            return min_cut(gm, inputs, **given)
        context = CastContext(mode, self.policy)
        run_passes(Captured(gm, mode), context, joint(results))
        forward, backward = min_cut(gm, inputs, **given)
        self.pack(forward, backward, results, context, strides)
        self.values.extend(_recomputed(backward))
        return forward, backward

    def pack(
        self,
        forward: GraphModule,
        backward: GraphModule,
        results: int,
        context: CastContext,
        strides: bool = True,
    ) -> None:
        """Pack the values that ``forward`` returns to ``backward`` after its first ``results`` outputs, in place."""
        mode = context.mode
        handed = tuple(saved(forward, results))
        run_passes(Captured(forward, mode), context, kept_forward(results))
        said = graph_output(forward.graph).meta
        unpack = UnpackKept(handed, said[RESTORE], tuple(saved(forward, results)), strides)
        run_passes(Captured(backward, mode), context, kept_backward(unpack))
        self.values.extend(said[KEPT_VALUES])

    def log_unmatched(self) -> None:
        """Log, once, each of the user's rules that matched no kept value."""
        used = {value.rule.id for value in self.values if value.rule is not None}
        unmatched = unmatched_rules(self.policy, used, KEPT) if self.values else ()
        warn_unmatched(self.policy.name, unmatched, "nothing that a compiled forward keeps")


def _mode_of(gm: GraphModule) -> FakeTensorMode | None:
    values = (value for node in gm.graph.nodes for value in fake_tensors(node.meta.get("val")))
    return next((fake_mode_of(value) for value in values), None)


def _recomputed(backward: GraphModule) -> list[KeptValue]:
    """Return the values that the backward recomputes because of a rule; they use no memory between the two."""
    marked = [node for node in backward.graph.nodes if RECOMPUTED in node.meta and tensor_value(node) is not None]
    return [told(node, node.name, node.meta[RECOMPUTED], "recompute", (0, 0)) for node in marked]


def kept_rules(policy: Policy | None, options: Options) -> KeptRules | None:
    """Return the rules for kept values; None without any. Raises OptionError if no partition can apply them."""
    if policy is None or not policy.has_rules_for(KEPT):
        return None
    ids = ", ".join(repr(rule.id) for rule in policy.rules if rule.region == KEPT)
    has = f"policy {policy.name!r} has rules for what is kept for the backward ({ids})"
    if options.lowering == "eager":
        raise OptionError(
            f"{has}, but lowering = 'eager' leaves that to autograd, without a graph; accepted with these rules: "
            "'inductor', 'aot_eager'"
        )
    if "custom_partitioner_fn" in options.inductor:
        raise OptionError(
            f"{has}, and option 'inductor' sets custom_partitioner_fn; accepted: only one of them, since both partition"
        )
    if torch._dynamo.config.compiled_autograd:
        raise OptionError(
            f"{has}, but torch._dynamo.config.compiled_autograd bypasses the compiler of backwards; accepted with "
            "these rules: compiled_autograd = False"
        )
    return KeptRules(policy)
