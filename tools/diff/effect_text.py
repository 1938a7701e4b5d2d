"""The effect on a graph as text: a table of the ops that change, the casts, and the modules that differ."""

from collections.abc import Callable, Iterator

from fxamp.listing.totals import Totals
from fxamp.tools.common.table import Column, printable, render
from fxamp.tools.common.terminal import Look
from fxamp.tools.common.words import counted, op_name, place, plural, size
from fxamp.tools.diff.effect import Effect, OpEffect

OPS = (
    Column("node", "middle", least=10, good=24),
    Column("source", "middle", least=12, good=28),
    Column("module", "middle", least=6, good=20),
    Column("op", "end", least=8, good=20),
    Column("before"),
    Column("after"),
    Column("rule", "end", least=8, good=24),
)
MODULES = (
    Column("module", "middle", least=10, good=24),
    Column("ops before", "end", least=10, good=20),
    Column("ops after", "end", least=10, good=20),
    Column("casts", right=True),
    Column("bytes cast", "end", least=10, good=20, right=True),
)


def effect_lines(effect: Effect, look: Look) -> Iterator[str]:
    """Yield the lines for one graph."""
    yield printable(title(effect))
    rows = [tuple(map(printable, op_row(op))) for op in effect.ops]
    if rows:
        yield ""
        yield from render(
            OPS, rows, look.width, ("source", "rule", "module", "node", "op"), ("source", "rule"), _paint(look)
        )
    if effect.modules:
        yield ""
        modules = [tuple(map(printable, module_row(*module))) for module in effect.modules]
        yield from render(MODULES, modules, look.width, ("module", "ops after", "ops before"), ("ops before",))
    labelled = list(totals(effect))
    longest = max((len(label) for label, _ in labelled), default=0)
    yield from [""] if labelled else []
    for label, text in labelled:
        yield f"{label:<{longest}}  {printable(text)}"


def title(effect: Effect) -> str:
    """Return the graph's name, and how many of its ops change."""
    name = f"{effect.file}: {effect.graph}"
    for side, why in zip(("old", "new"), effect.refused, strict=True):
        if why:
            return f"{name}: the {side} policy refuses it: {why}"
    return f"{name}: {plural(len(effect.ops), 'op')} with another dtype or cast"


def op_row(op: OpEffect) -> tuple[str, ...]:
    """Return the cells of an op: node, source, module, op, dtypes and rules before and after."""
    entry = op.entry
    before, after = (dtype or "-" for dtype in op.dtypes)
    old, new = (rule or "no rule" for rule in op.rules)
    name = f"{op.body}/{entry.name}" if op.body else entry.name
    rules = old if old == new else f"{old} -> {new}"
    return name, place(entry.source), entry.module, op_name(entry), before, after, rules


def module_row(path: str, old: Totals, new: Totals) -> tuple[str, ...]:
    """Return the cells of a module: ops by dtype before and after, casts, and the bytes that they read and write."""
    return (
        path or "(root)",
        counted(dict(old.ops_by_dtype)),
        counted(dict(new.ops_by_dtype)),
        change(str(old.casts), str(new.casts)),
        change(_bytes(old), _bytes(new)),
    )


def totals(effect: Effect) -> Iterator[tuple[str, str]]:
    """Yield the totals of the whole graph, each with its label."""
    if effect.sums is None:
        return
    old, new = effect.sums
    yield "ops", change(counted(dict(old.ops_by_dtype)), counted(dict(new.ops_by_dtype)))
    yield "casts", change(str(old.casts), str(new.casts))
    yield "bytes cast per step", change(_bytes(old), _bytes(new))
    yield "kept for the backward", change(*("unknown" if kept is None else size(kept) for kept in effect.kept))


def change(old: str, new: str) -> str:
    """Return ``"3 -> 4"``, or one value if both are the same."""
    return old if old == new else f"{old or 'none'} -> {new or 'none'}"


def _bytes(sums: Totals) -> str:
    if sums.casts_of_unknown_size == 0:
        return size(sums.cast_bytes)
    return "unknown" if sums.casts_of_unknown_size == sums.casts else f"at least {size(sums.cast_bytes)}"


def _paint(look: Look) -> Callable[[str, str], str]:
    return lambda title, cell: look.dtype(cell.strip(), cell) if title in ("before", "after") else cell
