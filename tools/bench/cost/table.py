"""Counts as tables, for a terminal or as Markdown."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxamp.tools.bench.cost.count import Access, Buffer, Count, Kernel
from fxamp.tools.bench.cost.rates import Rates
from fxamp.tools.bench.cost.row import Row
from fxamp.tools.bench.report import drawn

_GB, _MB = 1e9, 1e6


def ways(rows: Sequence[Row], rates: Rates, markdown: bool) -> str:
    """A row for each way of training; the last column is the estimate over that of the first row."""
    copied = any(row.sent or row.taken for row in rows)
    headers = (
        *("", "forward GB", "backward GB", "step GB", "all GB", "Triton", "library", "step"),
        *("TFLOP", "kept MB", "peak MB", "syncs", "graphs", *(["host GB"] if copied else []), "est. ms", "ratio"),
    )
    base = rows[0].milliseconds(rates)
    cells = [
        (
            row.label,
            *(f"{value / _GB:.4g}" for value in (row.forward, row.backward, row.step, row.bytes)),
            *(f"{value:.0f}" for value in (row.triton, row.library, row.outside)),
            ", ".join(f"{dtype} {flops / 1e12:.4g}" for dtype, flops in sorted(row.flops.items())),
            f"{row.kept / _MB:.4g}",
            f"{row.peak / _MB:.4g}",
            f"{row.syncs:.0f}",
            row.graphs,
            *([f"{(row.sent + row.taken) / _GB:.4g}"] if copied else []),
            f"{row.milliseconds(rates):.4g}",
            f"{row.milliseconds(rates) / base:.3f}" if base else "-",
        )
        for row in rows
    ]
    return drawn(cells, headers, markdown)


def every(cases: Sequence[tuple[str, str, str, Sequence[Row]]], rates: Rates, markdown: bool) -> str:
    """A line for each model, dtype, and what leaves the graph; in each cell the numbers of all ways, in order."""
    headers = ("", "dtype", "leaves", "GB", "launches", "kept MB", "peak MB", "est. ms")
    cells = [
        (
            f"`{model}`" if markdown else model,
            dtype,
            leaves,
            " / ".join(f"{row.bytes / _GB:.2f}" for row in rows),
            " / ".join(f"{row.triton + row.library + row.outside:.0f}" for row in rows),
            " / ".join(f"{row.kept / _MB:.0f}" for row in rows),
            " / ".join(f"{row.peak / _MB:.0f}" for row in rows),
            " / ".join(f"{row.milliseconds(rates):.2f}" for row in rows),
        )
        for model, dtype, leaves, rows in cases
    ]
    labels = list(dict.fromkeys(" / ".join(row.label for row in rows) for _, _, _, rows in cases))
    return "\n\n".join([drawn(cells, headers, markdown), *[f"In each cell: {label}." for label in labels]])


def heaviest(count: Count, most: int, markdown: bool) -> str:
    """The kernels that move most bytes; kernels that do the same to as many bytes share a row."""
    groups: dict[tuple[Any, ...], list[Kernel]] = defaultdict(list)
    for kernel in count.kernels:
        groups[kernel.stage, kernel.kind, kernel.ops, kernel.bytes].append(kernel)
    ranked = sorted(groups.values(), key=lambda group: -sum(kernel.bytes for kernel in group))[:most]
    cells = [
        (
            group[0].stage,
            group[0].kind,
            len(group),
            f"{sum(kernel.bytes for kernel in group) / _MB:.4g}",
            _operands(group[0].reads),
            _operands(group[0].writes),
            _cut(group[0].ops),
            ", ".join(_short(source) for source in group[0].sources[:3]),
        )
        for group in ranked
    ]
    headers = ("stage", "kind", "times", "MB", "reads, MB", "writes, MB", "ops", "from")
    return drawn(cells, headers, markdown)


def kept(count: Count, most: int, markdown: bool) -> str:
    """The largest tensors that the forward keeps for the backward."""
    ranked = sorted(count.kept, key=lambda value: -value.bytes)[:most]
    cells = [(*_size(value), *_origin(value)) for value in ranked]
    return drawn(cells, ("kept MB", "dtype", "shape", "op", "module", "from"), markdown)


def peak(count: Count, most: int, markdown: bool) -> str:
    """The moment of the peak, and the largest memory in use then."""
    moment = count.peak
    rest = moment.buffers[most:]
    cells = [(*_size(buffer), buffer.kind, buffer.stage, *_origin(buffer)) for buffer in moment.buffers[:most]]
    if rest:
        cells.append((f"{sum(b.bytes for b in rest) / _MB:.4g}", "", "", "", "", f"{len(rest)} others", "", ""))
    place = " ".join(part for part in (moment.module and f"in {moment.module}", _short(moment.source)) if part)
    text = f"{moment.bytes / _MB:.4g} MB in the {moment.stage}, at kernel {moment.kernel} of {moment.kernels}: "
    headers = ("MB", "dtype", "shape", "kind", "of the", "op", "module", "from")
    return f"{text}{_cut(moment.ops)} {place}\n\n{drawn(cells, headers, markdown)}"


def _size(buffer: Buffer) -> tuple[str, str, str]:
    return f"{buffer.bytes / _MB:.4g}", buffer.dtype, "x".join(map(str, buffer.shape))


def _origin(buffer: Buffer) -> tuple[str, str, str]:
    return buffer.op, buffer.module, _short(buffer.source)


def _operands(accesses: Sequence[Access]) -> str:
    """The large operands of a kernel: dtype and MB of each."""
    return " ".join(f"{access.dtype or '?'}:{access.bytes / _MB:.4g}" for access in accesses if access.bytes > 1e5)


def _cut(ops: str) -> str:
    return ops if len(ops) <= 80 else f"{ops[:77]}..."


def _short(source: str) -> str:
    path, _, line = source.rpartition(":")
    return f"{Path(path).name}:{line}" if path else ""


def note(rates: Rates) -> str:
    """Return what a reader must know about the numbers."""
    return (
        f"Counted, not measured. est. ms is an estimate: products at {rates.flops16 / 1e12:g} TFLOPS, everything else "
        f"at {rates.bandwidth / 1e9:g} GB/s. The step's kernels are counted by hand. Copies to host memory and back "
        f"run at {rates.host / 1e9:g} GB/s (host GB) while kernels run; est. ms has the time by which they take longer."
    )
