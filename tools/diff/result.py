"""The result of ``fxamp-diff``, before it is written in one of the formats."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxamp.policy.diff.policy_diff import PolicyDiff, diff_policies
from fxamp.tools.diff.sides import Side

if TYPE_CHECKING:
    from fxamp.tools.diff.effect import Effect
    from fxamp.tools.diff.numbers import Numbers


@dataclass(frozen=True)
class Comparison:
    """The difference of two policies, and its effect on graphs and on the numbers of models."""

    old: Side
    new: Side
    diff: PolicyDiff
    effects: "tuple[Effect, ...]" = ()
    runs: "tuple[Numbers, ...]" = ()


def compare(old: Side, new: Side) -> Comparison:
    """Compare two policies."""
    return Comparison(old, new, diff_policies(old.policy, new.policy))
