"""Who takes part in a graph."""

from torch.fx import GraphModule

from fxamp.backend.backward_rules import BackwardRules
from fxamp.backend.backward_steps import BackwardSteps
from fxamp.backend.kept_rules import KeptRules
from fxamp.backend.options import Options
from fxamp.backend.unread_results import UnreadResults, may_be_unread
from fxamp.backend.valueless_results import ValuelessResults
from fxamp.lowering_names import mode_settings
from fxamp.nonfinite.monitor import Monitor
from fxamp.nonfinite.watching import Watching
from fxamp.pipeline.participant import Participant
from fxamp.policy import Policy
from fxamp.policy.model.keep import KEPT
from fxamp.policy.model.results import RESULTS
from fxamp.scaler.graphs.scaled_backward import Scaling


def participants(policy: Policy | None, options: Options, gm: GraphModule, ended: str) -> tuple[Participant, ...]:
    """Return who takes part in Dynamo's graph ``gm``: the first one goes around what the others make.

    ``ended``: the reason for the graph break that ended it, if there was one. Raises OptionError if one cannot.
    """
    takes_part = [] if policy is None else _of_policy(policy, options, gm, ended)
    if options.nonfinite is not None:
        takes_part.append(Watching(Monitor(options.nonfinite, options.scaler is not None)))
    for participant in takes_part:
        participant.refuse(options.lowering, {**mode_settings(options.mode), **options.inductor})
    return tuple(takes_part)


def _of_policy(policy: Policy, options: Options, gm: GraphModule, ended: str) -> list[Participant]:
    """Return those that a graph with a policy has."""
    takes_part: list[Participant] = [ValuelessResults()] if policy.has_rules_for(RESULTS) else []
    if policy.has_rules_for(KEPT):
        takes_part.append(KeptRules(policy))
    if options.lowering != "eager" and (options.scaler is not None or not ended) and may_be_unread(gm):
        takes_part.append(UnreadResults(policy))
    if policy.has_rules_for("backward"):
        takes_part.append(BackwardRules(policy))
    if options.scaler is not None:
        takes_part.append(Scaling(options.scaler, policy))
    if policy.optimizer is not None and policy.optimizer.in_backward:
        takes_part.append(BackwardSteps(policy, scaled=options.scaler is not None))
    return takes_part
