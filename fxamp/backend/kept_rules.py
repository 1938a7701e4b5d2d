"""The rules of a policy for what is kept between forward and backward: applied to AOTAutograd's partition."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from fxamp.backend.once import warn_once
from fxamp.backend.options import Options
from fxamp.capture import Captured
from fxamp.errors import OptionError
from fxamp.graph import fake_mode_of, fake_tensors, graph_output
from fxamp.listing.kept import KeptValue
from fxamp.passes.base import CastContext
from fxamp.passes.partition.pack_kept import KEPT_VALUES, RESTORE
from fxamp.passes.partition.unpack_kept import UnpackKept
from fxamp.passes.sequences import kept_backward, kept_forward
from fxamp.passes.shared.saved_values import saved
from fxamp.pipeline import run_passes
from fxamp.policy import Policy

#: Makes a forward and a backward of a joint graph.
Partitioner = Callable[..., tuple[GraphModule, GraphModule]]

_UNMATCHED = "policy %s: rule %r (%s) matched nothing that a compiled forward keeps"


@dataclass(frozen=True)
class KeptRules:
    """A policy that has rules for what is kept; ``values`` fills with what became of each value, as graphs compile."""

    policy: Policy
    values: list[KeptValue] = field(default_factory=list)

    def partition(self, gm: GraphModule, inputs: Sequence[Any], **given: Any) -> tuple[GraphModule, GraphModule]:
        """Partition the joint graph ``gm`` by torch's min cut, and pack what it keeps."""
        from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut

        forward, backward = min_cut(gm, inputs, **given)
        self.pack(forward, backward, given["num_fwd_outputs"])
        return forward, backward

    def pack(self, forward: GraphModule, backward: GraphModule, results: int) -> None:
        """Pack what ``forward`` hands to ``backward`` past its first ``results`` outputs, in place."""
        values = (value for node in forward.graph.nodes for value in fake_tensors(node.meta.get("val")))
        mode = next((fake_mode_of(value) for value in values), None)
        if mode is None:
            return
        context = CastContext(mode, self.policy)
        handed = tuple(saved(forward, results))
        run_passes(Captured(forward, mode), context, kept_forward(results))
        said = graph_output(forward.graph).meta
        unpack = UnpackKept(handed, said[RESTORE], tuple(saved(forward, results)))
        run_passes(Captured(backward, mode), context, kept_backward(unpack))
        self.values.extend(said[KEPT_VALUES])

    def log_unmatched(self) -> None:
        """Log, once, each rule that decided nothing of what was kept."""
        used = {value.rule.id for value in self.values if value.rule is not None}
        for rule in self.policy.rules:
            if rule.region == "kept" and rule.id not in used and self.values:
                warn_once(__name__, _UNMATCHED, self.policy.name, rule.id, str(rule.origin or "made in Python"))


def kept_rules(policy: Policy | None, options: Options) -> KeptRules | None:
    """The rules for what is kept, if there are any. Raises OptionError where there is no partition to apply them to."""
    if policy is None or not policy.has_rules_for("kept"):
        return None
    ids = ", ".join(repr(rule.id) for rule in policy.rules if rule.region == "kept")
    has = f"policy {policy.name!r} has rules for what is kept for the backward ({ids})"
    if options.lowering == "eager":
        raise OptionError(
            f"{has}, but lowering = 'eager' leaves that to autograd, without a graph; accepted with these rules: "
            "'inductor', 'aot_eager'"
        )
    if "custom_partitioner_fn" in options.inductor:
        raise OptionError(
            f"{has}, and option 'inductor' sets custom_partitioner_fn; accepted: one of the two, since both partition"
        )
    if torch._dynamo.config.compiled_autograd:
        raise OptionError(
            f"{has}, but torch._dynamo.config.compiled_autograd traces backwards past their compiler; accepted with "
            "these rules: compiled_autograd = False"
        )
    return KeptRules(policy)
