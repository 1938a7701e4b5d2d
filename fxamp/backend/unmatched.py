"""A rule that a user wrote and that matched nothing is most often a misspelling: it is said, once."""

from fxamp.backend.once import warn_once
from fxamp.pipeline import GraphRecord

_UNMATCHED = "policy %s: rule %r (%s) matched no op of a compiled graph"


def log_unmatched(record: GraphRecord) -> None:
    """Log the rules that a user wrote and that decided no op of the graph of ``record``."""
    for rule in record.listing.unmatched:
        warn_once(__name__, _UNMATCHED, record.policy, rule.id, rule.origin or "made in Python")
