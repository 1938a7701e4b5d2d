"""The table of the values that a forward saves for its backward: for ``--kept``, and below the ops of a forward."""

from collections.abc import Iterator

from fxamp.graph_text.model import KeptValue, Listing, short_op
from fxamp.graph_text.totals import largest_first, total, totals_of
from fxamp.tools.common.columns import MODULE, REASON, RULE
from fxamp.tools.common.formatting import size_or
from fxamp.tools.common.numbered_rows import Group, combined
from fxamp.tools.common.table import Column, Layout, printable, render
from fxamp.tools.common.terminal import Look

_LAYOUT = Layout(
    (
        Column("kept", "middle", least=8, good=20),
        Column("made by", "end", least=8, good=24),
        MODULE,
        Column("shape", "end", least=6, good=16),
        Column("dtype"),
        Column("kept as"),
        Column("times", right=True),
        Column("before", right=True),
        Column("after", right=True),
        RULE,
        REASON,
    ),
    ("reason", "module", "made by", "rule", "kept", "shape"),
    ("reason", "shape", "module", "rule", "before"),
)


def kept_lines(listing: Listing, look: Look, by_size: bool, fold: bool) -> Iterator[str]:
    """Yield the table, in the order of the graph or the largest first, and the totals below it.

    With ``fold``, values of sibling modules that are kept alike are one row with their sum.
    """
    if not listing.kept:
        yield (
            "no values kept for a backward are known here: give the dump of a forward that AOTAutograd has "
            "partitioned, or a program with parameters and --policy"
        )
        return
    rows = [tuple(map(printable, _row(group))) for group in kept_groups(listing, by_size, fold)]
    yield from render(_LAYOUT, rows, look.width)
    before, after = totals_of(listing.kept)
    yield ""
    yield f"kept for the backward  {size_or(before, '?')} before, {size_or(after, '?')} after"


def kept_groups(listing: Listing, by_size: bool, fold: bool) -> list[Group[KeptValue]]:
    """Return the kept values, with those of sibling modules in one group if ``fold``; optionally the largest first."""
    values = largest_first(listing.kept) if by_size else list(listing.kept)
    if not fold:
        return [Group((value,), value.module) for value in values]
    groups = combined(values, lambda value: value.module, _content)
    return sorted(groups, key=lambda group: -(_sums(group)[1] or 0)) if by_size else groups


def _content(value: KeptValue) -> tuple[object, ...]:
    return (
        value.op, value.dtype, value.shape, value.form, value.before, value.after, value.rule, value.reason
    )  # fmt: skip


def _sums(group: Group[KeptValue]) -> tuple[int | None, int | None]:
    return total(value.before for value in group.items), total(value.after for value in group.items)


def _row(group: Group[KeptValue]) -> tuple[str, ...]:
    value = group.first
    before, after = _sums(group)
    return (
        value.name,
        short_op(value.op),
        group.module,
        "x".join(map(str, value.shape)) or "1",
        value.dtype,
        value.form,
        str(group.count) if group.count > 1 else "",
        size_or(before, "?"),
        size_or(after, "?"),
        "" if value.rule is None else value.rule.id,
        value.reason,
    )
