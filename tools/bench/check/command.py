"""fxamp-bench check: is what fxamp computes on this machine right, and how fast are its kernels?"""

import argparse
import datetime
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fxamp.errors import OptionError, nearest
from fxamp.lowerings import LOWERINGS
from fxamp.tools.bench.check.outcome import WRONG, Outcome
from fxamp.tools.bench.process import ContenderFailed, Process
from fxamp.tools.bench.report import Report, add_styles
from fxamp.tools.common.command_line import Parser, guarded, one_of
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.machine import machine
from fxamp.tools.common.output import put
from fxamp.tools.common.progress import bar, say

PROG = "fxamp-bench check"
_WORKER = "fxamp.tools.bench.check.worker"


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status: 1 if a check is not ok."""
    given = parser(PROG).parse_args(arguments)
    wrong: list[str] = []

    def answer() -> None:
        report = run(given, say)
        wrong.extend(report.failed)
        put(report.text(given))

    return guarded(PROG, answer) or int(bool(wrong))


def parser(prog: str) -> Parser:
    """The options of this command."""
    result = Parser(prog, "Check fxamp on this machine: its gradients, scaled steps and kernels, against torch's.")
    result.add_argument("--device", type=one_of("cpu", "cuda"), help="default: cuda where there is one, else cpu")
    result.add_argument(
        "--lowering", type=one_of(*LOWERINGS), default="inductor", help="of the compiled graphs (inductor)"
    )
    result.add_argument("--only", action="append", metavar="TEXT", help="checks whose name holds TEXT; may be repeated")
    result.add_argument("--no-speed", action="store_true", help="measure no bandwidth")
    add_styles(result)
    return result


def run(given: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Make all checks; ``say`` receives lines of progress. Raises OptionError without such a device or check."""
    import torch

    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: this machine has no CUDA device that torch can use; accepted here: cpu")
    outcomes: list[Outcome] = []
    with so_far(lambda: _table(_document(device, given, outcomes)) if outcomes else ""):
        for outcome in _outcomes(device, given):
            outcomes.append(outcome)
            if outcome.status == WRONG:
                say(f"not ok: {outcome.name}: {outcome.detail}")
        speed = [] if given.no_speed or device == "cpu" else _bandwidth(device, say)
    document = _document(device, given, outcomes, speed)
    failed = tuple(outcome.name for outcome in outcomes if outcome.status == WRONG)
    return Report(document, _table(document), _table(document, "github"), failed=failed)


def _outcomes(device: str, given: argparse.Namespace) -> Iterator[Outcome]:
    """Yield the outcome of each check; a check that ends its process is not ok, and the next one gets another."""
    from fxamp.tools.bench.check.listing import checks

    names = [check.name for check in checks(device, given.lowering)]
    chosen = [at for at, name in enumerate(names) if not given.only or any(text in name for text in given.only)]
    if not chosen:
        raise OptionError(f"--only {given.only[0]!r}: no check's name holds it{nearest(given.only[0], names)}")
    process: Process | None = None
    with tempfile.TemporaryDirectory() as cache, bar("checks", len(chosen), "check") as shown:
        try:
            for at in chosen:
                process = process or Process(_WORKER, {"device": device, "lowering": given.lowering}, Path(cache))
                try:
                    yield Outcome(**process.ask("check", at=at))
                except ContenderFailed as ended:
                    process.close()
                    process = None
                    yield Outcome(names[at], WRONG, str(ended), 0.0)
                shown.update()
        finally:
            if process is not None:
                process.close()


def _bandwidth(device: str, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return what ``fxamp-bench kernels`` measures on the device."""
    from fxamp.tools.bench.kernels import command as kernels

    rows = []
    for dtype in ("float16", "bfloat16", "float32"):
        options = kernels.parser(PROG).parse_args(["--device", device, "--dtype", dtype, "--sizes", "124000000"])
        rows += [{**row, "dtype": dtype} for row in kernels.run(options, say).document["rows"]]
    return rows


def _document(
    device: str, given: argparse.Namespace, outcomes: Sequence[Outcome], speed: Sequence[Any] = ()
) -> dict[str, Any]:
    import torch

    return {
        "version": 1,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(device, torch.get_num_threads()),
        "lowering": given.lowering,
        "checks": [asdict(outcome) for outcome in outcomes],
        "bandwidth": list(speed),
    }


def _table(document: dict[str, Any], style: str = "simple") -> str:
    """The document as tables, with a title and a sum."""
    rows = [(row["status"], row["name"], row["detail"], f"{row['seconds']:.1f}") for row in document["checks"]]
    parts = [
        ", ".join([document["date"], *(f"{k} {v}" for k, v in document["machine"].items())]),
        tabulate(rows, ("", "check", "seen", "s"), tablefmt=style, disable_numparse=True),
    ]
    if document["bandwidth"]:
        speed = [
            (row["work"], row["dtype"], f"{row['bandwidth'] / 1e9:.0f}", f"{row['of_copy']:.0%}")
            for row in document["bandwidth"]
            if row["of_copy"] is not None
        ]
        parts.append(tabulate(speed, ("kernel", "gradients", "GB/s", "of a copy"), tablefmt=style))
    counts = Counter(row["status"] for row in document["checks"])
    seconds = sum(row["seconds"] for row in document["checks"])
    return "\n\n".join(
        [*parts, f"{', '.join(f'{count} {status}' for status, count in counts.items())}; {seconds:.0f} s"]
    )


if __name__ == "__main__":
    raise SystemExit(main(__import__("sys").argv[1:]))
