"""The record of one graph: its listing, the passes that ran, and numbers about both."""

from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from fxamp.capture import Captured
from fxamp.graph_text import KeptValue, Listing
from fxamp.graph_text.model import FLOATS, FP8
from fxamp.graph_text.totals import Totals, totals
from fxamp.passes.base import CastContext
from fxamp.policy import Policy, Rule
from fxamp.policy.file.paths import is_built_in
from fxamp.reports.list_graph import list_graph, rule_ref
from fxamp.reports.nonfinite import NonFinite


@dataclass(frozen=True)
class PassRecord:
    """One pass over one graph: its name, its time in seconds, and its counts."""

    name: str
    seconds: float
    modified: int
    counts: dict[str, int]


@dataclass(frozen=True)
class CastGraph:
    """A captured graph after the passes that insert a policy's casts, with their ``context`` and their records."""

    captured: Captured
    context: CastContext
    passes: tuple[PassRecord, ...]


@dataclass(frozen=True)
class GraphRecord:
    """One graph that the backend compiled: the listing of the result, and the passes that ran, in order.

    ``kept``: what its forward saves for its backward, if the policy has rules for saved values. ``found`` reads the
    values that were not finite in its runs; None without the option "nonfinite".
    """

    listing: Listing
    passes: tuple[PassRecord, ...] = ()
    kept: tuple[KeptValue, ...] = ()
    found: Callable[[], tuple[NonFinite, ...]] | None = None

    @property
    def policy(self) -> str:
        """The policy's name; ``"float32"`` if none was applied."""
        return self.listing.policy

    @property
    def chosen(self) -> str:
        """Why this policy was chosen."""
        return self.listing.chosen

    @property
    def ended(self) -> str:
        """The reason for the graph break that ended the graph, ``""`` if there was none."""
        return self.listing.ended

    @cached_property
    def totals(self) -> Totals:
        """All numbers about the listing."""
        return totals(self.listing)

    @property
    def nonfinite(self) -> tuple[NonFinite, ...]:
        """The values that were not finite in its runs; waits for the device. See option "nonfinite"."""
        return () if self.found is None else self.found()

    @property
    def ops(self) -> int:
        """The number of ops of the program, as fxamp-show counts them: no inserted casts, no size arithmetic."""
        return self.totals.ops

    @property
    def casts(self) -> int:
        """The number of inserted casts."""
        return self.totals.casts

    @property
    def ops_by_dtype(self) -> dict[str, int]:
        """The ops by the dtype they run in: of their first floating-point result or as fp8; else ``"other"``."""
        counts: Counter[str] = Counter()
        for dtype, count in self.totals.ops_by_dtype.items():
            counts[dtype if dtype in FLOATS or dtype in FP8 else "other"] += count
        return dict(counts)

    @cached_property
    def rules(self) -> dict[str, int]:
        """The number of ops that each rule decides, by rule id."""
        return dict(Counter(entry.rule.id for _, entry in self.listing.walk() if entry.rule is not None))

    @property
    def verbatim(self) -> Mapping[str, str]:
        """The nodes that kept their captured dtypes, and why."""
        return self.totals.verbatim

    @property
    def seconds(self) -> float:
        """The time of all passes together, in seconds."""
        return sum(record.seconds for record in self.passes)

    @property
    def shared(self) -> int:
        """The number of further uses that share an inserted cast."""
        return self.listing.counts.get("shared", 0)

    @property
    def folded(self) -> int:
        """How many inserted casts were removed in pairs."""
        return self.listing.counts.get("folded", 0)


def record_graph(graph: CastGraph, chosen: str) -> GraphRecord:
    """Return the record of ``graph``; ``chosen`` says why its policy was chosen."""
    policy, counts = graph.context.policy, Counter[str]()
    for step in graph.passes:
        counts.update({name: count for name, count in step.counts.items() if name in ("shared", "folded")})
    listing = list_graph(
        graph.captured.module,
        stage="cast",
        policy=policy.name,
        device=policy.device,
        chosen=chosen,
        counts=dict(counts),
        ended=graph.context.ended,
    )
    used = {entry.rule.id for _, entry in listing.walk() if entry.rule is not None}
    unmatched = tuple(map(rule_ref, unmatched_rules(policy, used, "forward", "both")))
    return GraphRecord(replace(listing, unmatched=unmatched), graph.passes)


def unmatched_rules(policy: Policy, used: Container[str], *regions: str) -> list[Rule]:
    """Return the rules for ``regions`` whose ids are not among those ``used``, except those of the built-in files."""
    own = [rule for rule in policy.rules if rule.origin is None or not is_built_in(rule.origin.file)]
    return [rule for rule in own if rule.id not in used and rule.region in regions]
