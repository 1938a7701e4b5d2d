"""The effect on a graph as parts: the ops that change, the modules that differ, and the totals."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fxamp.graph_text.totals import Totals
from fxamp.tools.common.columns import MODULE, NODE, OP, RULE, SOURCE
from fxamp.tools.common.formatting import bytes_cast, counted, op_name, place, plural, size_or
from fxamp.tools.common.numbered_rows import combined
from fxamp.tools.common.table import Column, Layout
from fxamp.tools.diff.part import Cells, Part, Shape, change, titles

if TYPE_CHECKING:
    from fxamp.tools.diff.effect import Effect, OpEffect

_TIMES = Column("times", right=True)
_OPS = Layout(
    (NODE, SOURCE, MODULE, OP, Column("before"), Column("after"), _TIMES, RULE),
    ("source", "rule", "module", "node", "op"),
    ("source", "rule"),
    ("before", "after"),
)
_MODULES = Layout(
    (
        Column("module", "middle", least=10, good=24),
        Column("ops before", "end", least=10, good=20),
        Column("ops after", "end", least=10, good=20),
        _TIMES,
        Column("casts", right=True),
        Column("bytes cast", "end", least=10, good=20, right=True),
    ),
    ("module", "ops after", "ops before"),
    ("ops before",),
)


def effect_parts(effect: "Effect") -> Iterator[Part]:
    """Yield the parts for one graph."""
    yield Part(_title(effect))
    for name, layout, rows in (("ops", _OPS, _op_rows(effect)), ("modules", _MODULES, _module_rows(effect))):
        if rows:
            yield Part(f"{len(rows)} {name}", layout, rows, folds=True)
    yield from totals_part(effect)


def _title(effect: "Effect") -> str:
    """Return the graph's name, and how many of its ops change."""
    name = f"{effect.file}: {effect.graph}"
    for side, why in zip(("old", "new"), effect.rejections, strict=True):
        if why:
            return f"{name}: the {side} policy refuses it: {why}"
    return f"{name}: {plural(len(effect.ops), 'op')} with another dtype or cast"


def totals_part(effect: "Effect") -> Iterator[Part]:
    """Yield the totals of the whole graph, unless a policy rejects it."""
    if effect.sums is None:
        return
    rows = [
        ("ops", *(counted(dict(sums.ops_by_dtype)) for sums in effect.sums)),
        ("casts", *(str(sums.casts) for sums in effect.sums)),
        ("bytes cast per step", *map(bytes_cast, effect.sums)),
        ("kept for the backward", *(size_or(kept, "unknown") for kept in effect.kept)),
    ]
    names = ("", "old", "new")
    yield Part("", titles(*names), rows, Shape("facts", change), prose=names)


def _op_rows(effect: "Effect") -> list[Cells]:
    """Return the cells of each op: node, source, module, op, dtypes before and after, times, rules.

    Ops that differ only in the number of their module and in their name are one row.
    """
    groups = combined(effect.ops, lambda op: op.entry.module, _op_cells)
    return [(_name(group.first), *_op_cells(group.first, group.module, group.count)) for group in groups]


def _name(op: "OpEffect") -> str:
    return f"{op.body}/{op.entry.name}" if op.body else op.entry.name


def _op_cells(op: "OpEffect", module: str = "", count: int = 1) -> Cells:
    before, after = (dtype or "-" for dtype in op.dtypes)
    old, new = (rule or "no rule" for rule in op.rules)
    rules = old if old == new else f"{old} -> {new}"
    return place(op.entry.source), module, op_name(op.entry), before, after, _times(count), rules


def _module_rows(effect: "Effect") -> list[Cells]:
    """Return the cells of each module: ops by dtype before and after, times, casts, and the bytes they read and write.

    Modules that differ only in their number are one row; its counts are those of one of them.
    """
    groups = combined(effect.modules, lambda module: module[0], _module_cells)
    return [(group.module or "(root)", *_module_cells(group.first, group.count)) for group in groups]


def _module_cells(module: tuple[str, Totals, Totals], count: int = 1) -> Cells:
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
