"""Warn once if a policy for fp8 runs nothing in fp8: most often that is a mistake."""

from fxamp.backend.once import warn_once
from fxamp.listing.model import Entry
from fxamp.listing.totals import totals
from fxamp.pipeline import GraphRecord
from fxamp.policy import Policy

_NOTHING = "policy %s: nothing of a compiled graph runs in fp8: %s"


def warn_nothing_in_fp8(policy: Policy, record: GraphRecord) -> None:
    """Log that a graph runs nothing in fp8, if it trains matrices or has products that rules for fp8 name."""
    if not policy.has_fp8:
        return
    sums = totals(record.listing)
    if sums.fp8:
        return
    if sums.not_fp8:
        node, why = next(iter(sums.not_fp8.items()))
        others = f", and {len(sums.not_fp8) - 1} more" if len(sums.not_fp8) > 1 else ""
        warn_once(__name__, _NOTHING, policy.name, f"{node} stays in 16 bits: {why}{others}")
    elif any(_trained_matrix(entry) for entry in record.listing.entries):
        warn_once(__name__, _NOTHING, policy.name, "it has no product of an op that a rule for fp8 names")


def _trained_matrix(entry: Entry) -> bool:
    return entry.needs_grad and any(len(value.shape) >= 2 for value in entry.values)
