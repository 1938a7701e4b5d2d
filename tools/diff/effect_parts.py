"""The effect on a graph as text: a table of the ops that change, the casts, and the modules that differ."""

from collections.abc import Iterator

from fxamp.listing.totals import Totals
from fxamp.tools.common.columns import MODULE, NODE, OP, RULE, SOURCE, painter
from fxamp.tools.common.formatting import bytes_cast, counted, op_name, place, plural, size_or
from fxamp.tools.common.numbered_rows import combined
from fxamp.tools.common.table import Column, labelled, printable, render
from fxamp.tools.common.terminal import Look
from fxamp.tools.diff.effect import Effect, OpEffect

_TIMES = Column("times", right=True)
OPS = (NODE, SOURCE, MODULE, OP, Column("before"), Column("after"), _TIMES, RULE)
MODULES = (
    Column("module", "middle", least=10, good=24),
    Column("ops before", "end", least=10, good=20),
    Column("ops after", "end", least=10, good=20),
    _TIMES,
    Column("casts", right=True),
    Column("bytes cast", "end", least=10, good=20, right=True),
)


def effect_lines(effect: Effect, look: Look) -> Iterator[str]:
    """Yield the lines for one graph."""
    yield printable(title(effect))
    rows = [tuple(map(printable, row)) for row in op_rows(effect)]
    if rows:
        yield ""
        shortened = ("source", "rule", "module", "node", "op")
        yield from render(OPS, rows, look.width, shortened, ("source", "rule"), painter(look, "before", "after"))
    if effect.modules:
        yield ""
        modules = [tuple(map(printable, row)) for row in module_rows(effect)]
        yield from render(MODULES, modules, look.width, ("module", "ops after", "ops before"), ("ops before",))
    sums = list(totals(effect))
    yield from [""] if sums else []
    yield from labelled(sums, look.width)


def title(effect: Effect) -> str:
    """Return the graph's name, and how many of its ops change."""
    name = f"{effect.file}: {effect.graph}"
    for side, why in zip(("old", "new"), effect.rejections, strict=True):
        if why:
            return f"{name}: the {side} policy refuses it: {why}"
    return f"{name}: {plural(len(effect.ops), 'op')} with another dtype or cast"


def op_rows(effect: Effect) -> list[tuple[str, ...]]:
    """Return the cells of each op: node, source, module, op, dtypes before and after, times, rules.

    Ops that differ only in the number of their module and in their name are one row.
    """
    groups = combined(effect.ops, lambda op: op.entry.module, _op_cells)
    return [(_name(group.first), *_op_cells(group.first, group.module, group.count)) for group in groups]


def _name(op: OpEffect) -> str:
    return f"{op.body}/{op.entry.name}" if op.body else op.entry.name


def _op_cells(op: OpEffect, module: str = "", count: int = 1) -> tuple[str, ...]:
    before, after = (dtype or "-" for dtype in op.dtypes)
    old, new = (rule or "no rule" for rule in op.rules)
    rules = old if old == new else f"{old} -> {new}"
    return place(op.entry.source), module, op_name(op.entry), before, after, _times(count), rules


def module_rows(effect: Effect) -> list[tuple[str, ...]]:
    """Return the cells of each module: ops by dtype before and after, times, casts, and the bytes they read and write.

    Modules that differ only in their number are one row; its counts are those of one of them.
    """
    groups = combined(effect.modules, lambda module: module[0], _module_cells)
    return [(group.module or "(root)", *_module_cells(group.first, group.count)) for group in groups]


def _module_cells(module: tuple[str, Totals, Totals], count: int = 1) -> tuple[str, ...]:
    _, old, new = module
    return (
        counted(dict(old.ops_by_dtype)),
        counted(dict(new.ops_by_dtype)),
        _times(count),
        change(str(old.casts), str(new.casts)),
        change(bytes_cast(old), bytes_cast(new)),
    )


def _times(count: int) -> str:
    return str(count) if count > 1 else ""


def totals(effect: Effect) -> Iterator[tuple[str, str]]:
    """Yield the totals of the whole graph, each with its label."""
    if effect.sums is None:
        return
    old, new = effect.sums
    yield "ops", change(counted(dict(old.ops_by_dtype)), counted(dict(new.ops_by_dtype)))
    yield "casts", change(str(old.casts), str(new.casts))
    yield "bytes cast per step", change(bytes_cast(old), bytes_cast(new))
    yield "kept for the backward", change(*(size_or(kept, "unknown") for kept in effect.kept))


def change(old: str, new: str) -> str:
    """Return ``"3 -> 4"``, or one value if both are the same."""
    return old if old == new else f"{old or 'none'} -> {new or 'none'}"
