"""Apply a policy's rules for the backward to the graph that AOTAutograd derives and partitions."""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from fxamp.backend.options import Options
from fxamp.errors import OptionError
from fxamp.passes.shared.decision import decision
from fxamp.policy import Policy
from fxamp.reports.record import unmatched_rules
from fxamp.reports.warnings import warn_unmatched


@dataclass(frozen=True)
class BackwardRules:
    """A policy with rules for the backward."""

    policy: Policy

    def log_unmatched(self, gm: GraphModule) -> None:
        """Log, once, each rule that matched no op of the rewritten backward graph ``gm``."""
        used = {made.rule.id for node in gm.graph.nodes if (made := decision(node)) is not None and made.rule}
        warn_unmatched(self.policy.name, unmatched_rules(self.policy, used, "backward"), "no op of a backward graph")


def backward_rules(policy: Policy | None, options: Options) -> BackwardRules | None:
    """Return the policy's rules for the backward; None if it has none.

    Raises OptionError if there will be no backward graph to apply them to.
    """
    if policy is None or not policy.has_rules_for("backward"):
        return None
    ids = ", ".join(repr(rule.id) for rule in policy.rules if rule.region in ("backward", "both"))
    if options.lowering == "eager":
        raise OptionError(
            f"policy {policy.name!r} has rules for the backward ({ids}), but lowering = 'eager' leaves the backward to "
            "autograd, without a graph; accepted with these rules: 'inductor', 'aot_eager'"
        )
    if torch._dynamo.config.compiled_autograd:
        raise OptionError(
            f"policy {policy.name!r} has rules for the backward ({ids}), but torch._dynamo.config.compiled_autograd "
            "bypasses the compiler of AOTAutograd's backward graphs; accepted with these rules: "
            "compiled_autograd = False"
        )
    return BackwardRules(policy)
