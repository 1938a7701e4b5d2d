"""Warnings that would repeat for every graph, logged once per process each."""

import logging
from collections.abc import Container
from dataclasses import dataclass, field
from functools import cache

from fxamp.capture import IN_TRANSFORM
from fxamp.graph_text.model import Entry
from fxamp.policy import Policy
from fxamp.reports.record import CastGraph, GraphRecord, unmatched_rules

_UNMATCHED = "policy %s: rule %r (%s) matched %s"
_NO_CASTS = (
    "policy %s: a compiled graph (with %s) trains in float32, because a named policy casts nothing in torch.func "
    "transforms and in the bodies of loops; accepted: policy 'auto', with torch.autocast around the call"
)
_NOTHING_IN_FP8 = "policy %s: nothing of a compiled graph runs in fp8: %s"

#: The loops whose bodies are left as captured, as listings name them.
_LOOPS = frozenset(f"higher_order::{name}" for name in ("associative_scan", "map_impl", "scan", "while_loop"))


@dataclass(frozen=True)
class Example:
    """Text in a warning, such as the location of one graph of many, that does not make it a different warning."""

    text: str = field(compare=False)

    def __str__(self) -> str:
        return self.text


@cache
def warn_once(logger: str, message: str, *arguments: str | Example) -> None:
    """Log ``message`` as a warning on the logger named ``logger``; logging formats it with ``arguments``."""
    logging.getLogger(logger).warning(message, *arguments)


def warn_unmatched(policy: Policy, used: Container[str], what: str, *regions: str) -> None:
    """Log rules that match nothing (:func:`unmatched_rules`): often a name is misspelled. ``what`` ends the message."""
    for rule in unmatched_rules(policy, used, *regions):
        warn_once(__name__, _UNMATCHED, policy.name, rule.id, str(rule.origin or "made in Python"), what)


def warn_opaque(graph: CastGraph, record: GraphRecord) -> None:
    """Log that a graph that trains matrices has no casts, if torch.func transforms or loops in it return matrices.

    A named policy casts nothing inside of them. Under an ambient autocast they run as it says.
    """
    context = graph.context
    if record.casts or context.captured_autocast is not None or context.only_regions is not None:
        return
    entries = record.listing.entries
    opaque = [entry for entry in entries if _in_transform_or_loop(entry) and _is_matrix(entry)]
    if opaque and any(map(_trained_matrix, entries)):
        warn_once(__name__, _NO_CASTS, context.policy.name, Example(opaque[0].name))


def warn_nothing_in_fp8(policy: Policy, record: GraphRecord) -> None:
    """Log that a graph runs nothing in fp8, if it trains matrices or has products that rules for fp8 name."""
    if not policy.has_fp8:
        return
    sums = record.totals
    if sums.fp8:
        return
    if sums.not_fp8:
        node, why = next(iter(sums.not_fp8.items()))
        others = f", and {len(sums.not_fp8) - 1} more" if len(sums.not_fp8) > 1 else ""
        warn_once(__name__, _NOTHING_IN_FP8, policy.name, f"{node} stays in 16 bits: {why}{others}")
    elif any(_trained_matrix(entry) for entry in record.listing.entries):
        warn_once(__name__, _NOTHING_IN_FP8, policy.name, "it has no op that a rule for fp8 names")


def _in_transform_or_loop(entry: Entry) -> bool:
    return entry.verbatim == IN_TRANSFORM or (bool(entry.verbatim) and entry.target in _LOOPS)


def _trained_matrix(entry: Entry) -> bool:
    return entry.needs_grad and _is_matrix(entry)


def _is_matrix(entry: Entry) -> bool:
    return any(len(value.shape) >= 2 for value in entry.values)
