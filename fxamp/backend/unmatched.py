"""A rule that a user wrote and that matched nothing is most often a misspelling: it is said, once."""

import logging
from functools import cache
from pathlib import Path

import fxamp.policies
from fxamp.pipeline import GraphRecord
from fxamp.policy import Policy, Rule

log = logging.getLogger(__name__)


def log_unmatched(policy: Policy, record: GraphRecord) -> None:
    """Log the rules of ``policy`` that decided no op of the graph of ``record``; not those of the built-in files."""
    for rule in policy.rules:
        if rule.id not in record.rules and not _built_in(rule):
            _say_once(policy.name, rule.id, str(rule.origin or ""))


def _built_in(rule: Rule) -> bool:
    folder = Path(next(iter(fxamp.policies.__path__))).resolve()
    return rule.origin is not None and Path(rule.origin.file).resolve().parent == folder


@cache
def _say_once(policy: str, rule: str, where: str) -> None:
    log.warning("policy %s: rule %r (%s) matched no op of a compiled graph", policy, rule, where or "made in Python")
