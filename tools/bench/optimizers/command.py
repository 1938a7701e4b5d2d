"""fxamp-bench optimizers: steps that skip on the device, one row for every optimizer."""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from fxamp.errors import OptionError
from fxamp.tools.bench.report import Report, add_styles
from fxamp.tools.common.command_line import Parser, guarded, one_of
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.output import put
from fxamp.tools.common.progress import bar, say

PROG = "fxamp-bench optimizers"
DEVICES = ("cpu", "cuda")


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status: 1 if an optimizer differs or fails, 2 after a user's mistake."""
    given = parser(PROG).parse_args(arguments)
    wrong: list[str] = []

    def bench() -> None:
        report = run(given, say)
        put(report.text(given))
        wrong.extend(report.failed)

    return guarded(PROG, bench) or int(bool(wrong))


def parser(prog: str) -> Parser:
    """The options of this command."""
    from fxamp.lowerings import STEP_LOWERINGS

    result = Parser(prog, 'Compare every optimizer under fxamp.GradScaler(skip="device") with torch\'s GradScaler.')
    add = result.add_argument
    add("--device", type=one_of(*DEVICES), default="cpu", help="cpu (default) or cuda")
    add(
        "--lowering",
        type=one_of(*STEP_LOWERINGS),
        default="inductor",
        help=f"{', '.join(STEP_LOWERINGS)} (default inductor)",
    )
    add("--optimizers", type=_names(), metavar="NAMES", help="class names with commas between them (default: all)")
    add_styles(result)
    return result


def run(given: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Measure; ``say`` receives lines of progress. Raises OptionError where there is no such device."""
    import torch

    from fxamp.tools.bench.optimizers.measure import Setup, cheapest_of_torch, measure
    from fxamp.tools.bench.optimizers.optimizers import choices
    from fxamp.tools.bench.optimizers.result import Result
    from fxamp.tools.bench.optimizers.table import table
    from fxamp.tools.common.machine import machine

    if given.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: this machine has no CUDA device that torch can use; accepted here: cpu")
    setup = Setup(given.device, given.lowering)
    facts = machine(given.device, torch.get_num_threads())
    names = tuple(given.optimizers or choices())
    rows: list[Any] = []
    cheapest = cheapest_of_torch(setup)

    def result() -> Result:
        return Result(facts, given.device, given.lowering, rows, cheapest)

    with bar("optimizers", len(names), "optimizer") as shown, so_far(lambda: table(result()) if rows else ""):
        for name in names:
            say(f"{name} ...")
            start = time.perf_counter()
            rows.append(measure(name, choices()[name], setup))
            say(f"{name}: {rows[-1].decided_by}, {time.perf_counter() - start:.0f} s")
            shown.update()
    failed = tuple(row.name for row in rows if row.wrong)
    return Report(result().as_dict(), table(result()), table(result(), markdown=True), failed=failed)


def _names() -> Callable[[str], tuple[str, ...]]:
    """An argparse ``type``: names of optimizers with commas between them, each once."""
    from fxamp.tools.bench.optimizers.optimizers import choices

    check = one_of(*choices())

    def names(text: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(check(part.strip()) for part in text.split(",")))

    return names
