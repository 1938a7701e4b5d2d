"""The text of the totals below a graph's table."""

from collections.abc import Iterator

from fxamp.listing.model import Listing
from fxamp.listing.totals import Totals
from fxamp.tools.common.table import printable
from fxamp.tools.common.words import counted, plural, rule_name, size

#: The maximum number of ops to name.
_NAMED = 12

#: Stages without a backward, or whose backward is a separate graph.
_AFTER_AUTOGRAD = frozenset({"forward", "backward", "joint", "optimizer"})


def totals_lines(listing: Listing, sums: Totals, whole: bool) -> Iterator[str]:
    """Yield the lines; ``whole``: the sums cover all of ``listing``, so its own numbers are printed too."""
    lines = [("ops", _ops(sums)), ("casts", _casts(listing, sums, whole))]
    if whole:
        lines += [("kept for the backward", _kept(listing))]
    lines += [("ops that no rule matched", _named(dict(sums.without_rule)))]
    lines += [("products in fp8", counted(dict(sums.fp8)))]
    lines += [("in 16 bits, not in fp8", f"{node}: {why}") for node, why in list(sums.not_fp8.items())[:_NAMED]]
    lines += [("", f"and {len(sums.not_fp8) - _NAMED} more")] if len(sums.not_fp8) > _NAMED else []
    lines += [("kept as captured", f"{node}: {why}") for node, why in sums.verbatim.items()]
    if whole:
        lines += [("rule that matched nothing", rule_name(rule)) for rule in listing.unmatched]
        lines += [("the graph ends here", listing.ended)]
    lines = [(label, text) for label, text in lines if text]
    longest = max(len(label) for label, _ in lines)
    for label, text in lines:
        yield f"{label:<{longest}}  {printable(text)}"


def _ops(sums: Totals) -> str:
    return f"{sums.ops}: {counted(dict(sums.ops_by_dtype))}" if sums.ops else "0"


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
    shown = {name.removeprefix("aten::").removesuffix(".default"): counts[name] for name in list(counts)[:_NAMED]}
    more = f", and {len(counts) - _NAMED} more" if len(counts) > _NAMED else ""
    return f"{sum(counts.values())}: {counted(shown)}{more}" if counts else ""
