"""The counted kernels as rows, JSON and a table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fxamp.tools.bench.cost.kernels.bound import Bound, bound
from fxamp.tools.bench.cost.kernels.count import Count, count
from fxamp.tools.bench.cost.kernels.devices import Device
from fxamp.tools.bench.cost.kernels.instruction import Unit
from fxamp.tools.bench.cost.kernels.subjects import Subject
from fxamp.tools.bench.report import drawn

NOTE = (
    "Counted, not measured. ideal, moved: bytes per element. warps: how many a multiprocessor holds. Then instructions "
    "per element by unit; once: FP64 instructions that each thread executes once per program. bound: the share of the "
    "memory's bandwidth that the machine code permits, and what limits it."
)


@dataclass(frozen=True)
class Row:
    """One kernel on one device; ``bound`` is None for a kernel without elements."""

    subject: Subject
    device: Device
    count: Count
    bound: Bound | None

    def document(self) -> dict[str, Any]:
        """The row as JSON's values."""
        own = self.count
        return {
            "kernel": self.subject.name,
            "aligned": self.subject.aligned,
            "device": self.device.name,
            "arch": self.device.arch,
            "ideal": round(self.subject.ideal, 3),
            "moved": round(own.moved, 3),
            "widest": own.widest,
            "registers": own.binary.registers,
            "spills": own.binary.spills,
            "warps": self.bound.warps if self.bound else None,
            "instructions": {unit.value: round(own.an_element(unit), 1) for unit in Unit},
            "once": {unit.value: own.once(unit) for unit in (Unit.FP64,)},
            "shares": {name: round(share, 2) for name, share in self.bound.shares.items()} if self.bound else {},
            "bound": round(self.bound.share, 2) if self.bound else None,
            "limit": self.bound.limit if self.bound else None,
        }


def rows(subject: Subject, devices: Sequence[Device]) -> Iterator[Row]:
    """Count a kernel for each device; devices of one architecture share its binary."""
    counts: dict[str, Count] = {}
    for device in devices:
        if device.arch not in counts:
            counts[device.arch] = count(subject.program(device.wave), device.arch)
        own = counts[device.arch]
        yield Row(subject, device, own, bound(own, device) if own.elements else None)


def table(documents: Sequence[dict[str, Any]], markdown: bool) -> str:
    """Return the table of what :meth:`Row.document` returned."""
    units = [unit.value for unit in Unit]
    cells = [
        (
            row["kernel"],
            "yes" if row["aligned"] else "no",
            row["device"],
            *(f"{row[name]:.2f}".rstrip("0").rstrip(".") for name in ("ideal", "moved")),
            row["widest"],
            row["registers"],
            row["spills"],
            row["warps"] or "-",
            *(f"{row['instructions'][unit]:.1f}" for unit in units),
            row["once"][Unit.FP64.value],
            "-" if row["bound"] is None else f"{row['bound']:.2f}",
            row["limit"] or "-",
        )
        for row in documents
    ]
    head = ("kernel", "aligned", "GPU", "ideal", "moved", "widest", "registers", "spills", "warps", *units)
    return f"{drawn(cells, (*head, 'once', 'bound', 'limit'), markdown)}\n\n{NOTE}"
