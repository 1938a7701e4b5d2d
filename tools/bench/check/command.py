"""fxamp-bench check: does fxamp compute the right numbers on this machine, and how fast are its kernels?"""

import argparse
import datetime
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fxamp.errors import OptionError, nearest
from fxamp.lowering_names import LOWERINGS
from fxamp.tools.bench.check.check_line import WRONG, Outcome
from fxamp.tools.bench.process import ContenderFailed, Process
from fxamp.tools.bench.report import Report, add_styles, drawn, require_device
from fxamp.tools.common.command_line import Parser, one_of, positive
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.machine import machine
from fxamp.tools.common.progress import bar

#: Environment variables of a process that checks. The tensors are tiny, and processes share the processors. On a CPU
#: Inductor has only a few files to compile, and a pool of processes for that imports torch in each.
_SETTINGS = {
    "cpu": {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    "cuda": {"OMP_NUM_THREADS": "1"},
}
#: Elements that a timed kernel works on: more than the caches of a GPU hold.
_TIMED = 124_000_000


def parser(prog: str) -> Parser:
    """The options of this command."""
    result = Parser(prog, "Check fxamp on this machine: its gradients, scaled steps and kernels, against torch's.")
    result.add_argument("--device", type=one_of("cpu", "cuda"), help="default: cuda where there is one, else cpu")
    result.add_argument(
        "--lowering", type=one_of(*LOWERINGS), default="inductor", help="lowering of the compiled graphs (inductor)"
    )
    result.add_argument(
        "--only", action="append", metavar="TEXT", help="only checks whose name contains TEXT; repeatable"
    )
    result.add_argument("--jobs", type=positive, help="processes at once (default: one for each processor, at most 4)")
    result.add_argument("--no-speed", action="store_true", help="measure no bandwidth")
    add_styles(result)
    return result


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Run all checks; ``say`` receives lines of progress. Raises OptionError if there is no such device or check."""
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(device)
    start, outcomes = time.perf_counter(), list[Outcome]()

    def document(speed: Sequence[Any] = ()) -> dict[str, Any]:
        return _document(device, options, outcomes, time.perf_counter() - start, speed)

    with so_far(lambda: _table(document()) if outcomes else ""):
        for outcome in _outcomes(device, options):
            outcomes.append(outcome)
            say(f"{outcome.status}: {outcome.name}: {outcome.detail}")
        speed = [] if options.no_speed or device == "cpu" else _bandwidth(options, say)
    whole = document(speed)
    failed = tuple(outcome.name for outcome in outcomes if outcome.status == WRONG)
    return Report(whole, _table(whole), _table(whole, markdown=True), failed=failed)


def _outcomes(device: str, options: argparse.Namespace) -> Iterator[Outcome]:
    """Yield the outcome of each chosen check, in the order in which they end."""
    from fxamp.tools.bench.check.checks import checks
    from fxamp.tools.bench.check.workers import outcomes, processes

    names = [check.name for check in checks(device, options.lowering)]
    chosen = [at for at, name in enumerate(names) if not options.only or any(text in name for text in options.only)]
    if not chosen:
        given = " or ".join(map(repr, options.only))
        raise OptionError(f"--only {given}: no check's name contains it{nearest(options.only[0], names)}")
    with tempfile.TemporaryDirectory() as cache, bar("checks", len(chosen), "check") as shown:
        start = partial(Process, checks, device, options.lowering, cache=Path(cache), settings=_SETTINGS[device])
        for outcome in outcomes(names, chosen, start, options.jobs or processes()):
            yield outcome
            shown.update()


def _bandwidth(options: argparse.Namespace, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return a row for each timed kernel; none, and a line of progress that says why, if its process dies."""
    from fxamp.tools.bench.check.checks import checks, speed

    say("bandwidth of each kernel ...")
    try:
        with (
            tempfile.TemporaryDirectory() as cache,
            Process(checks, "cuda", options.lowering, cache=Path(cache)) as process,
        ):
            return process.ask(speed, device="cuda", parameters=_TIMED, rounds=10)
    except ContenderFailed as failed:
        say(f"no bandwidth: {failed}")
        return []


def _document(
    device: str, options: argparse.Namespace, outcomes: Sequence[Outcome], seconds: float, speed: Sequence[Any]
) -> dict[str, Any]:
    return {
        "version": 1,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(device, 1),
        "lowering": options.lowering,
        "seconds": round(seconds, 1),
        "checks": [asdict(outcome) for outcome in outcomes],
        "bandwidth": list(speed),
    }


def _table(document: dict[str, Any], markdown: bool = False) -> str:
    """The document as tables, with a title, a sum, and a conclusion."""
    rows = [(row["status"], row["name"], row["detail"], f"{row['seconds']:.1f}") for row in document["checks"]]
    parts = [
        ", ".join([document["date"], *(f"{k} {v}" for k, v in document["machine"].items())]),
        drawn(rows, ("", "check", "seen", "s"), markdown),
    ]
    if document["bandwidth"]:
        parts.append(_speed_table(document["bandwidth"], markdown))
    return "\n\n".join([*parts, _answer(document)])


def _answer(document: dict[str, Any]) -> str:
    """Return the last line: whether everything is right, the number of checks by outcome, and what is wrong."""
    counts = Counter(row["status"] for row in document["checks"])
    wrong = [row["name"] for row in document["checks"] if row["status"] == WRONG]
    sums = ", ".join(f"{count} {status}" for status, count in counts.items())
    what = f"Not ok: {'; '.join(wrong)}" if wrong else "All that could be checked here is right"
    return f"{what}. {sums}; {document['seconds']:.0f} s"


def _speed_table(rows: Sequence[dict[str, Any]], markdown: bool) -> str:
    cells = [
        (
            row["kernel"],
            f"{row['bandwidth'] / 1e9:.0f}",
            *("-" if row[share] is None else f"{row[share]:.0%}" for share in ("of_copy", "of_peak", "counted")),
            "-" if row["of_torch"] is None else f"{row['of_torch']:.2f}",
        )
        for row in rows
    ]
    return drawn(cells, ("kernel", "GB/s", "of a copy", "of the peak", "counted", "torch's time / its"), markdown)
