"""The summary above a graph's table: dtypes, casts, kept bytes, the largest costs, and what is unusual."""

import re
from collections.abc import Iterator

from fxamp.graph_text.model import Entry, Listing, short_op
from fxamp.graph_text.totals import Index, Totals, by_reason, totals
from fxamp.tools.common.formatting import counted, plural, rule_name, size
from fxamp.tools.common.numbered_rows import combined
from fxamp.tools.common.table import cut
from fxamp.tools.show.findings import findings
from fxamp.tools.show.kept_text import kept_groups
from fxamp.tools.show.select import Selection

#: The maximum number of ops to name.
_NAMED = 12

#: The number of largest costs to name.
_LARGEST = 3

#: Longer names are cut: those of parameters repeat their modules.
_LONGEST_NAME = 32

#: Numbers in the names of nodes, which count equal names.
_NUMBERS = re.compile(r"\d+")

#: Stages without a backward, or whose backward is a separate graph.
_AFTER_AUTOGRAD = frozenset({"forward", "backward", "joint", "optimizer"})


def summary(listing: Listing, number: int, selection: Selection) -> list[tuple[str, str]]:
    """Return the lines, each with its label, for graph ``number``: totals of what ``--module`` selects."""
    sums, whole = totals(listing, selection.scope), not selection.scoped
    lines = [
        ("ops", f"{sums.ops}: {counted(dict(sums.ops_by_dtype))}" if sums.ops else "0"),
        ("casts", _casts(listing, sums, whole)),
    ]
    lines += [("kept for the backward", _kept(listing))] if whole else []
    lines += _labelled_once("largest casts", _largest_casts(listing, selection))
    lines += _labelled_once("largest kept", _largest_kept(listing)) if whole else []
    lines += [("ops that no rule matched", _named(dict(sums.without_rule)))]
    lines += [("products in fp8", counted(dict(sums.fp8)))]
    lines += [("in 16 bits, not in fp8", text) for text in by_reason(sums.not_fp8, _LARGEST)]
    lines += [("verbatim", text) for text in by_reason(sums.verbatim, _LARGEST)]
    if whole:
        lines += [("rule that matched nothing", rule_name(rule)) for rule in listing.unmatched]
        lines += [("the graph ends here", listing.ended)]
    problems = findings([(number, listing)], selection.scope, rules=False)
    lines += (
        [("looks wrong", f"{plural(len(problems), 'place')}: --check says where, and what to do")] if problems else []
    )
    return [(label, text) for label, text in lines if text]


def _largest_casts(listing: Listing, selection: Selection) -> Iterator[str]:
    """Yield what casts most: casts that differ only in their module's number together, with the bytes of all."""
    index = Index()
    casts = [
        (entry, moved, index.cast_from(where, entry))
        for where, entry in listing.walk()
        if entry.is_cast and selection.scope(entry) and (moved := index.bytes_cast(where, entry))
    ]
    groups = combined(casts, lambda cast: cast[0].module, _content)
    for group in sorted(groups, key=lambda group: -group.first[1] * group.count)[:_LARGEST]:
        cast, moved, before = group.first
        name = f"{cut(cast.name, _LONGEST_NAME, 'middle')}{f' in {group.module}' if group.module else ''}"
        yield f"{size(moved * group.count)}: {name}, {before or '?'} to {cast.dtype}{_times(group.count)}"


def _content(of: tuple[Entry, int, str]) -> tuple[object, ...]:
    cast, moved, before = of
    return moved, cast.source, cast.dtype, cast.values, before, _NUMBERS.sub("", cast.name)


def _times(count: int) -> str:
    return f", {count} times" if count > 1 else ""


def _largest_kept(listing: Listing) -> Iterator[str]:
    for group in kept_groups(listing, by_size=True, fold=True)[:_LARGEST]:
        after = sum(value.after or 0 for value in group.items)
        where = f" in {group.module}" if group.module else ""
        yield f"{size(after)}: {group.first.name}{where}, as {group.first.form}{_times(group.count)}"


def _labelled_once(label: str, texts: Iterator[str]) -> list[tuple[str, str]]:
    return [(label if at == 0 else "", text) for at, text in enumerate(texts)]


def _casts(listing: Listing, sums: Totals, whole: bool) -> str:
    if not listing.policy and not sums.casts:
        return ""
    parts = [f"{sums.casts} inserted"]
    if whole and sums.shared is not None:
        parts.append(f"{sums.shared} shared")
    if whole and sums.folded is not None:
        parts.append(f"{sums.folded} folded")
    if sums.casts:
        parts.append(_moved(sums))
    return ", ".join(parts)


def _moved(sums: Totals) -> str:
    unknown = sums.casts_of_unknown_size
    if unknown == sums.casts:
        return "bytes unknown: their sizes are symbolic or not in the dump"
    least = f"at least {size(sums.cast_bytes)}" if unknown else size(sums.cast_bytes)
    rest = f" ({plural(unknown, 'cast')} of unknown size not counted)" if unknown else ""
    return f"{least} read and written per step{rest}"


def _kept(listing: Listing) -> str:
    before, after = listing.kept_before, listing.kept_after
    if before is None and after is None:
        return "" if listing.stage in _AFTER_AUTOGRAD else _kept_unknown(listing)
    words = [_amount(before, "before"), _amount(after, "after")]
    if before and after is not None:
        words.append(f"{100 * (after - before) / before:+.0f}%")
    return ", ".join(words)


def _amount(count: int | None, when: str) -> str:
    return f"unknown {when}" if count is None else f"{size(count)} {when}"


def _kept_unknown(listing: Listing) -> str:
    if not listing.policy:
        return "unknown: no policy was applied"
    if any(isinstance(side, str) for entry in listing.entries for value in entry.values for side in value.shape):
        return "unknown: sizes are symbolic"
    return "unknown: it was not measured for this graph"


def _named(counts: dict[str, int]) -> str:
    shown = {short_op(name): count for name, count in list(counts.items())[:_NAMED]}
    more = f", and {len(counts) - _NAMED} more" if len(counts) > _NAMED else ""
    return f"{sum(counts.values())}: {counted(shown)}{more}" if counts else ""
