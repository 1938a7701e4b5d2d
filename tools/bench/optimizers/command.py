"""fxamp-bench optimizers: the evidence for steps that skip on the device, one row for every optimizer."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

from fxamp.errors import OptionError
from fxamp.tools.common.command_line import Parser, guarded, one_of

PROG = "fxamp-bench optimizers"
DEVICES = ("cpu", "cuda")


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status: 1 if an optimizer differs or fails, 2 after a user's mistake."""
    given = parser(PROG).parse_args(arguments)
    wrong: list[str] = []
    return guarded(PROG, lambda: wrong.extend(_bench(given))) or int(bool(wrong))


def parser(prog: str) -> Parser:
    """The options of this command."""
    from fxamp.optim import LOWERINGS

    result = Parser(prog, 'Compare every optimizer under fxamp.GradScaler(skip="device") with torch\'s GradScaler.')
    add = result.add_argument
    add("--device", type=one_of(*DEVICES), default="cpu", help="cpu (default) or cuda")
    add("--lowering", type=one_of(*LOWERINGS), default="inductor", help=f"{', '.join(LOWERINGS)} (default inductor)")
    add("--optimizers", type=_names(), metavar="NAMES", help="class names with commas between them (default: all)")
    style = result.add_mutually_exclusive_group()
    style.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    style.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return result


def _bench(given: argparse.Namespace) -> list[str]:
    """Measure and print; returns the optimizers that differ or fail."""
    import torch

    from fxamp.tools.bench.optimizers.measure import Setup, cheapest_of_torch, measure
    from fxamp.tools.bench.optimizers.optimizers import choices
    from fxamp.tools.bench.optimizers.result import Result
    from fxamp.tools.bench.optimizers.table import table
    from fxamp.tools.common.machine import machine

    if given.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: this machine has no CUDA device that torch can use; accepted here: cpu")
    setup = Setup(given.device, given.lowering)
    rows = []
    for name in given.optimizers or choices():
        _say(f"{name} ...")
        start = time.perf_counter()
        rows.append(measure(name, choices()[name], setup))
        _say(f"{name}: {rows[-1].decided_by}, {time.perf_counter() - start:.0f} s")
    facts = machine(given.device, torch.get_num_threads())
    result = Result(facts, given.device, given.lowering, rows, cheapest_of_torch(setup))
    print(json.dumps(result.as_dict(), indent=2) if given.json else table(result, given.markdown))
    return [row.name for row in rows if row.wrong]


def _names() -> Callable[[str], tuple[str, ...]]:
    """An argparse ``type``: names of optimizers with commas between them, each once."""
    from fxamp.tools.bench.optimizers.optimizers import choices

    check = one_of(*choices())

    def names(text: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(check(part.strip()) for part in text.split(",")))

    return names


def _say(text: str) -> None:
    print(text, file=sys.stderr)
