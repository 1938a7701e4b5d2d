"""The rules of a policy for the backward: applied to the graph that AOTAutograd derives and partitions."""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from fxamp.backend.once import warn_once
from fxamp.backend.options import Options
from fxamp.errors import OptionError
from fxamp.passes.shared.decision import decision
from fxamp.policy import Policy

_UNMATCHED = "policy %s: rule %r (%s) matched no op of a backward graph"


@dataclass(frozen=True)
class BackwardRules:
    """A policy that has rules for the backward."""

    policy: Policy

    def log_unmatched(self, gm: GraphModule) -> None:
        """Log, once, each rule that decided no op of the rewritten backward graph ``gm``."""
        used = {made.rule.id for node in gm.graph.nodes if (made := decision(node)) is not None and made.rule}
        for rule in self.policy.rules:
            if rule.region == "backward" and rule.id not in used:
                warn_once(__name__, _UNMATCHED, self.policy.name, rule.id, str(rule.origin or "made in Python"))


def backward_rules(policy: Policy | None, options: Options) -> BackwardRules | None:
    """The rules for the backward, if there are any.

    Raises OptionError where there is no backward graph that they could hold for.
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
            "traces AOTAutograd's backward graphs past their compiler; accepted with these rules: "
            "compiled_autograd = False"
        )
    return BackwardRules(policy)
