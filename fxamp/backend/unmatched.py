"""A rule that a user wrote and that matched nothing is most often a misspelling: it is said, once."""

import logging
from functools import cache

from fxamp.pipeline import GraphRecord

log = logging.getLogger(__name__)


def log_unmatched(record: GraphRecord) -> None:
    """Log the rules that a user wrote and that decided no op of the graph of ``record``."""
    for rule in record.listing.unmatched:
        _say_once(record.policy, rule.id, rule.origin)


@cache
def _say_once(policy: str, rule: str, where: str) -> None:
    log.warning("policy %s: rule %r (%s) matched no op of a compiled graph", policy, rule, where or "made in Python")
