"""The table of the values that a forward keeps for its backward: for ``--kept``, and below the ops of a forward."""

from collections.abc import Iterator

from fxamp.listing import KeptValue, Listing
from fxamp.listing.kept import largest_first, totals_of
from fxamp.tools.common.table import Column, printable, render
from fxamp.tools.common.terminal import Look
from fxamp.tools.common.words import size

_COLUMNS = (
    Column("kept", "middle", least=8, good=20),
    Column("made by", "end", least=8, good=24),
    Column("module", "middle", least=6, good=24),
    Column("shape", "end", least=6, good=16),
    Column("dtype"),
    Column("kept as"),
    Column("before", right=True),
    Column("after", right=True),
    Column("rule", "end", least=8, good=20),
    Column("reason", "end", least=12, good=20),
)
_SHORTENED = ("reason", "module", "made by", "rule", "kept", "shape")
_LEFT_OUT = ("reason", "shape", "module", "rule", "before")


def kept_lines(listing: Listing, look: Look, by_size: bool) -> Iterator[str]:
    """Yield the table, in the order of the graph or the largest first, and the totals below it."""
    if not listing.kept:
        yield "nothing is known of kept values: they are in the dump of a forward that AOTAutograd has partitioned"
        return
    values = largest_first(listing.kept) if by_size else list(listing.kept)
    rows = [tuple(map(printable, _row(value))) for value in values]
    yield from render(_COLUMNS, rows, look.width, _SHORTENED, _LEFT_OUT, lambda title, cell: cell)
    before, after = totals_of(listing.kept)
    yield ""
    yield f"kept for the backward  {_bytes(before)} before, {_bytes(after)} after"


def _row(value: KeptValue) -> tuple[str, ...]:
    return (
        value.name,
        value.op.removeprefix("aten::").removesuffix(".default"),
        value.module,
        "x".join(map(str, value.shape)) or "1",
        value.dtype,
        value.form,
        _bytes(value.before),
        _bytes(value.after),
        "" if value.rule is None else value.rule.id,
        value.reason,
    )


def _bytes(count: int | None) -> str:
    return "?" if count is None else size(count)
