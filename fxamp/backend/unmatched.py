"""A rule that a user wrote and that matched nothing is most often a misspelling: it is said, once."""

import logging
from functools import cache

from fxamp.pipeline import GraphRecord
from fxamp.policy import Policy, Rule
from fxamp.policy.builtin import is_built_in

log = logging.getLogger(__name__)


def log_unmatched(policy: Policy, record: GraphRecord) -> None:
    """Log the rules of ``policy`` that decided no op of the graph of ``record``; not those of the built-in files."""
    for rule in policy.rules:
        if rule.id not in record.rules and not _built_in(rule):
            _say_once(policy.name, rule.id, str(rule.origin or ""))


def _built_in(rule: Rule) -> bool:
    return rule.origin is not None and is_built_in(rule.origin.file)


@cache
def _say_once(policy: str, rule: str, where: str) -> None:
    log.warning("policy %s: rule %r (%s) matched no op of a compiled graph", policy, rule, where or "made in Python")
