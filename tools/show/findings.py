"""``--check``: find suspicious nodes in a graph, and say where they are and what to do.

1. casts-back-and-forth: an inserted cast returns a value, possibly through views, to the dtype that another inserted
   cast converted it from.
2. float16-range: an op runs in float16 that ``torch.autocast`` keeps in float32 on this device (by the built-in
   policy), and no rule asks for that.
3. unmatched-rule: a rule of the user's policy matched nothing in any graph.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from fxamp.errors import PolicyError
from fxamp.graph_text.model import Entry, Listing, Source
from fxamp.graph_text.totals import Index, is_op, is_pick
from fxamp.policy import CastRule, Category, Policy
from fxamp.tools.common.formatting import op_name, place, plural, rule_name
from fxamp.tools.show.select import Keep, everything

#: Ops that return their input's values in another shape or order.
# fmt: off
_VIEWS = frozenset(
    (
        "view", "reshape", "_unsafe_view", "t", "transpose", "permute", "expand", "expand_as", "squeeze",
        "unsqueeze", "flatten", "unflatten", "select", "slice", "narrow", "split", "split_with_sizes", "chunk",
        "unbind", "alias", "detach", "contiguous", "clone", "view_as", "reshape_as", "movedim", "swapaxes",
        "numpy_T", "mT", "tensor_split", "lift_fresh_copy",
    )
)
# fmt: on

_KEPT_WIDE = frozenset({Category.FP32, Category.FP32_SET_OPT_DTYPE, Category.FP32_APPEND_DTYPE})

#: Stages in which policies apply to the ops; ops of later stages are decomposed, captured ones not cast yet.
_STAGES = frozenset({"", "cast"})


@dataclass(frozen=True)
class Finding:
    """One finding: its kind, the graph's number, the node and its location, the problem, the advice."""

    kind: str
    graph: int
    what: str
    advice: str
    node: str = ""
    module: str = ""
    source: Source | None = None


def findings(graphs: Sequence[tuple[int, Listing]], keep: Keep = everything, rules: bool = True) -> list[Finding]:
    """Return the findings at the nodes of ``graphs`` that ``keep`` accepts, in order, then (``rules``) the rules that
    matched nothing. Each graph comes with its number."""
    results: list[Finding] = []
    for number, listing in graphs:
        index = Index()
        checks_range = listing.stage in _STAGES and not listing.has_tangents
        for where, entry in listing.walk():
            if not keep(entry):
                continue
            if entry.is_cast:
                results += _back_and_forth(number, where, entry, index)
            elif checks_range and entry.dtype == "f16" and is_op(entry):
                results += _out_of_range(number, where, entry, index, listing.device)
    return results + list(_unmatched(graphs) if rules else ())


def finding_lines(results: Sequence[Finding]) -> Iterator[str]:
    """Yield the findings as text."""
    for finding in results:
        where = [place(finding.source), finding.module and f"module {finding.module}", finding.node]
        yield f"{finding.kind} in graph {finding.graph}: {', '.join(part for part in where if part)}".rstrip(": ")
        yield f"  {finding.what}"
        yield f"  {finding.advice}"
    yield plural(len(results), "finding") if results else "no findings"


def _back_and_forth(number: int, where: Listing, cast: Entry, index: Index) -> Iterator[Finding]:
    before = _before_views(where, cast, index)
    if before is None or not before.is_cast:
        return
    origin = next(iter(index.inputs(where, before)), None)
    if origin is None or origin.dtype != cast.dtype or before.dtype == cast.dtype:
        return
    users = [entry.name for entry in where.entries if cast.name in entry.inputs]
    yield _at(
        "casts-back-and-forth",
        number,
        cast,
        f"{origin.name} is cast {origin.dtype} to {before.dtype} by {before.name} and back to {cast.dtype} by "
        f"{cast.name} (inserted {cast.inserted}; the first {before.inserted})",
        f"let both uses have one dtype: a rule for {before.name}'s users or for {', '.join(users) or 'the output'}; "
        f"--why {cast.name} shows which op needs it",
    )


def _before_views(where: Listing, cast: Entry, index: Index) -> Entry | None:
    """Return the node whose values ``cast`` reads, before views and getitems."""
    entry: Entry | None = next(iter(index.inputs(where, cast)), None)
    while entry is not None and (is_pick(entry) or _is_view(entry)):
        entry = next(iter(index.inputs(where, entry)), None)
    return entry


def _is_view(entry: Entry) -> bool:
    packet = entry.target.removeprefix("aten::").removeprefix(".").partition(".")[0]
    return entry.is_call and packet in _VIEWS


def _out_of_range(number: int, where: Listing, entry: Entry, index: Index, device: str) -> Iterator[Finding]:
    rule = _kept_wide(device or _device(entry), entry.target)
    if rule is None or (entry.rule is not None and entry.rule.cast not in _KEPT_WIDE):
        return
    if not any(source.dtype == "f16" for source in index.inputs(where, entry)):
        return
    name = op_name(entry)
    packet = name.partition(".")[0]
    yield _at(
        "float16-range",
        number,
        entry,
        f"{name} runs in float16; torch.autocast keeps it in float32 (rule {rule.id}): {rule.why}",
        f'give the policy a rule for it, [[rule]] id = "{packet}" cast = "{rule.cast}" ops = ["{packet}"], or one with '
        "lower_precision_fp that says why float16 is enough here",
    )


def _device(entry: Entry) -> str:
    return next((value.device for value in entry.values if value.device), "cuda")


@cache
def _kept_wide(device: str, op: str) -> CastRule | None:
    """Return the rule by which autocast on ``device`` ("cuda", "cuda:0") keeps an op in float32; None without one."""
    rule = _table(device.partition(":")[0]).rule_for(op) if op.startswith("aten::") else None
    return rule if isinstance(rule, CastRule) and rule.cast in _KEPT_WIDE else None


@cache
def _table(device: str) -> Policy:
    try:
        return Policy.load(f"{device}-float16").resolve()
    except PolicyError:  # autocast has no table for this device
        return Policy.load("cuda-float16").resolve()


def _unmatched(graphs: Sequence[tuple[int, Listing]]) -> Iterator[Finding]:
    decides = {entry.rule.id for _, listing in graphs for _, entry in listing.walk() if entry.rule is not None}
    rules: set[str] = set()
    for number, listing in graphs:
        for rule in listing.unmatched:
            if rule.id in decides | rules:
                continue
            rules.add(rule.id)
            yield Finding(
                "unmatched-rule",
                number,
                f"rule {rule_name(rule)} of policy {listing.policy} matches no op",
                "compare its ops with the names in the op column (aten::NAME.OVERLOAD), or remove it",
            )


def _at(kind: str, number: int, entry: Entry, what: str, advice: str) -> Finding:
    return Finding(kind, number, what, advice, entry.name, entry.module, entry.source)
