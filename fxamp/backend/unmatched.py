"""Warn once about a user's rule that matched nothing: most often it is misspelled."""

from fxamp.backend.once import warn_once
from fxamp.pipeline import GraphRecord

_UNMATCHED = "policy %s: rule %r (%s) matched no op of a compiled graph"


def log_unmatched(record: GraphRecord) -> None:
    """Log the user's rules that matched no op of the graph of ``record``."""
    for rule in record.listing.unmatched:
        warn_once(__name__, _UNMATCHED, record.policy, rule.id, rule.origin or "made in Python")
