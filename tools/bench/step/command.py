"""fxamp-bench step: how long compiling AdamW's step takes, and how long a step, for any number of parameters."""

import argparse
from collections.abc import Callable, Sequence

from fxamp.errors import OptionError
from fxamp.tools.bench.report import Report, add_styles
from fxamp.tools.common.command_line import Parser, guarded, one_of, positive, positives
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.output import put
from fxamp.tools.common.progress import say

PROG = "fxamp-bench step"
DEVICES = ("cpu", "cuda")
NAMES = ("foreach", "fused", "compile", "fxamp")
"""The contenders' names; their steps are in :mod:`fxamp.tools.bench.step.contenders`, which imports torch."""


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status: 1 if a contender failed, 2 after a user's mistake."""
    given = parser(PROG).parse_args(arguments)
    failed: list[str] = []

    def bench() -> None:
        report = run(given, say)
        put(report.text(given))
        failed.extend(report.failed)

    return guarded(PROG, bench) or int(bool(failed))


def parser(prog: str) -> Parser:
    """The options of this command."""
    from fxamp.lowerings import STEP_LOWERINGS

    result = Parser(
        prog,
        "Time compiling AdamW's step, with fresh caches, and the step itself, each contender in a process of its own.",
    )
    add = result.add_argument
    add("--parameters", type=positives, default=(148, 1000), help="how many tensors, GPT-2's (default 148,1000)")
    add("--width", type=positive, default=64, help="of GPT-2 (default 64); 768 makes 148 tensors its 124 M elements")
    add("--contenders", type=_names, default=NAMES, metavar="NAMES", help=f"of {','.join(NAMES)} (default all)")
    add("--rounds", type=positive, default=5, help="in which all contenders step in turn (default 5)")
    add("--steps", type=positive, default=5, help="of a contender in a round (default 5)")
    add("--device", type=one_of(*DEVICES), default="cpu", help="cpu (default) or cuda")
    add("--threads", type=positive, help="of the CPU (default: torch's)")
    add("--lowering", type=one_of(*STEP_LOWERINGS), default="inductor", help="of what compiles (default inductor)")
    add_styles(result)
    return result


def run(given: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Measure; ``say`` receives lines of progress. Raises OptionError where there is no such device."""
    import torch

    from fxamp.tools.bench.step.measure import measure
    from fxamp.tools.bench.step.setup import Setup
    from fxamp.tools.bench.step.table import Row, table
    from fxamp.tools.common.machine import machine

    if given.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: this machine has no CUDA device that torch can use; accepted here: cpu")
    threads = given.threads or torch.get_num_threads()
    facts = machine(given.device, threads)
    rows: list[Row] = []
    with so_far(lambda: table(facts, rows) if rows else ""):
        for parameters in given.parameters:
            setup = Setup(parameters, given.width, given.device, threads, given.lowering)
            rows += [(setup, each) for each in measure(setup, given.contenders, given.rounds, given.steps, say)]
    document = {"machine": facts, "rows": [setup.as_dict() | each.as_dict() for setup, each in rows]}
    failed = tuple(each.name for _, each in rows if each.failed)
    return Report(document, table(facts, rows), table(facts, rows, markdown=True), failed=failed)


def _names(text: str) -> tuple[str, ...]:
    """An argparse ``type``: names of contenders with commas between them, each once."""
    check = one_of(*NAMES)
    return tuple(dict.fromkeys(check(part.strip()) for part in text.split(",")))
