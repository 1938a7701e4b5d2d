"""fxamp-bench kernels: check, unscale, norm and scale update, against torch's foreach ops and the speed of a copy.

With ``--count`` nothing runs: all generated kernels, of optimizers too, are compiled and their machine code is counted.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from fxamp.errors import OptionError
from fxamp.tools.bench.kernel_count.command import counted
from fxamp.tools.bench.report import Report, add_styles
from fxamp.tools.bench.spread import Spread
from fxamp.tools.common.command_line import Parser, guarded, one_of, positive, positives
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.machine import machine
from fxamp.tools.common.output import put
from fxamp.tools.common.progress import bar, say

PROG = "fxamp-bench kernels"
_DTYPES = ("float16", "bfloat16", "float32")
_SIZES = {"cpu": (10_000, 1_000_000), "cuda": (1_000_000, 16_000_000, 124_000_000)}


@dataclass(frozen=True)
class Row:
    """One kind of work on one size. Bytes of gradients per element; ``copy`` moves as many bytes as ``ours``."""

    work: str
    parameters: int
    our_bytes: float
    their_bytes: float
    ours: Spread
    theirs: Spread
    copy: Spread | None

    @property
    def ratio(self) -> float:
        """fxamp's time over torch's."""
        return self.ours.median / self.theirs.median

    @property
    def bandwidth(self) -> float:
        """Bytes per second that fxamp moves."""
        return self.our_bytes * self.parameters / self.ours.median

    @property
    def of_copy(self) -> float | None:
        """The copy's time over fxamp's: 1 is the limit."""
        return None if self.copy is None else self.copy.median / self.ours.median


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status."""
    given = parser(PROG).parse_args(arguments)
    return guarded(PROG, lambda: put(run(given, say).text(given)))


def parser(prog: str) -> Parser:
    """The options of this command."""
    result = Parser(prog, "Time the kernels for gradients against torch's foreach ops and a plain copy.")
    sizes = "; ".join(f"{','.join(map(str, counts))} on {device}" for device, counts in _SIZES.items())
    result.add_argument("--sizes", type=positives, help=f"parameters (default {sizes})")
    result.add_argument("--dtype", type=one_of(*_DTYPES), default="float16", help=f"{', '.join(_DTYPES)} (float16)")
    result.add_argument("--device", type=one_of(*_SIZES), default="cpu", help="cpu (default) or cuda")
    result.add_argument("--rounds", type=positive, default=20, help="rounds, all work in turn (default 20)")
    result.add_argument("--threads", type=positive, default=1, help="CPU threads (default 1)")
    result.add_argument(
        "--count", action="store_true", help="compile for GPUs that need not be here, and count instead"
    )
    result.add_argument("--arch", action="append", default=[], metavar="A", help="count for this one only; repeatable")
    add_styles(result)
    return result


def run(given: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Measure or count; ``say`` receives lines of progress.

    Raises OptionError where there is no such device, or nothing to count with.
    """
    if given.count:
        return counted(given.arch, say)
    if given.arch:
        raise OptionError("--arch is for --count; kernels are timed on this machine's own device")
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: this machine has no CUDA device that torch can use; accepted here: cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(given.threads)
    sizes = given.sizes or _SIZES[given.device]
    rows: list[Any] = []
    try:
        with bar("sizes", len(sizes), "size") as shown, so_far(lambda: _table(_document(given, rows)) if rows else ""):
            for size in sizes:
                say(f"{size} parameters ...")
                rows += _rows(size, given)
                shown.update()
    finally:
        torch.set_num_threads(before)
    document = _document(given, rows)
    return Report(document, _table(document), _table(document, markdown=True))


def _document(given: argparse.Namespace, rows: Sequence[Any]) -> dict[str, Any]:
    import torch

    from fxamp.kernels.dispatch import implementation

    return {
        "version": 1,
        "machine": machine(given.device, given.threads),
        "implementation": implementation(torch.device(given.device)).value,
        "dtype": given.dtype,
        "rounds": given.rounds,
        "rows": [
            asdict(row) | {"ratio": row.ratio, "bandwidth": row.bandwidth, "of_copy": row.of_copy} for row in rows
        ],
    }


def _table(document: dict[str, Any], markdown: bool = False) -> str:
    """The document as a table with its title and notes."""
    rows = [
        (
            row["work"],
            f"{row['parameters']:,}",
            *(f"{row[name]:.1f}" if row["our_bytes"] else "-" for name in ("our_bytes", "their_bytes")),
            f"{row['ratio']:.2f}",
            *(f"{1e6 * row[name]['median']:.1f}" for name in ("ours", "theirs")),
            "-" if row["of_copy"] is None else f"{row['of_copy']:.0%}",
            f"{row['bandwidth'] / 1e9:.1f}" if row["our_bytes"] else "-",
        )
        for row in document["rows"]
    ]
    headers = ("work", "parameters", "bytes/par.", "torch's", "time to torch's", "us", "torch's us", "of copy", "GB/s")
    facts = dict(document["machine"])
    title = f"{document['dtype']} gradients on {facts.pop('device')}; " + ", ".join(
        f"{k} {v}" for k, v in facts.items()
    )
    drawn = tabulate(rows, headers, tablefmt="github" if markdown else "simple", disable_numparse=True)
    return f"{title}\n\n{drawn}\n\n{_note(document)}"


def _note(document: dict[str, Any]) -> str:
    note = f"Times are medians of {document['rounds']} rounds, all work in turn. Bytes per parameter are predicted. "
    if document["implementation"] != "triton":
        return note + "No Triton kernel ran: fxamp used ATen ops, which move more bytes."
    return note + f"fxamp's implementation: {document['implementation']}."


def _rows(size: int, given: argparse.Namespace) -> list[Row]:
    import torch

    from fxamp.tools.bench.kernels.timing import time_in_turn
    from fxamp.tools.bench.kernels.work import cases, copied

    rows = []
    for case in cases(size, getattr(torch, given.dtype), given.device):
        work = {"ours": case.ours, "theirs": case.theirs}
        if case.our_bytes:
            work["copy"] = copied(case.our_bytes, given.device)
        times = time_in_turn(work, given.device, given.rounds)
        moved = case.our_bytes / size, case.their_bytes / size
        rows.append(Row(case.name, size, *moved, times["ours"], times["theirs"], times.get("copy")))
    return rows
