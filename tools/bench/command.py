"""fxamp-bench: measures fxamp itself. Each subcommand is a module that is imported when it is called.

train    what does training take?
cost     what does a step cost on a GPU that is not here?
check    is what fxamp computes on this machine right?
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol, cast

from fxamp.errors import nearest
from fxamp.tools.bench.report import Report
from fxamp.tools.common.command_line import Parser, guarded
from fxamp.tools.common.output import notice, put
from fxamp.tools.common.progress import say


class Subcommand(Protocol):
    """The module of a subcommand."""

    def parser(self, prog: str) -> Parser:
        """Return the parser of its options."""

    def run(self, options: argparse.Namespace, say: Callable[[str], None]) -> Report:
        """Measure; ``say`` receives lines of progress. Raises FxampError for a user's mistake."""


#: Subcommand -> (its module, what it measures).
SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "check": (
        "fxamp.tools.bench.check.command",
        "is what fxamp computes on this machine right? Minutes, on a GPU or a CPU",
    ),
    "train": (
        "fxamp.tools.bench.train.command",
        "training steps: eager, autocast, torch.compile and fxamp side by side",
    ),
    "step": (
        "fxamp.tools.bench.train.step",
        "an optimizer's step: the time of compiling it, and of a step, beside torch's",
    ),
    "cost": (
        "fxamp.tools.bench.cost.command",
        "bytes, launches and FLOPs of a step on a GPU, counted without one",
    ),
    "policies": (
        "fxamp.tools.bench.cost.policies",
        "each shipped policy: what a step moves and keeps by the count, and its error; fxamp-policy list prints it",
    ),
    "kernels": (
        "fxamp.tools.bench.cost.kernels.command",
        "the machine code of generated kernels: the most of a GPU's bandwidth that it permits, counted without one",
    ),
}

#: A name that is no subcommand, and what answers its question.
ELSEWHERE = {
    "optimizers": "fxamp-bench step times an optimizer's step; fxamp-bench check --only step compares it with torch's",
    "passes": "fxamp-bench train compares the time of compiling with torch.compile's",
    "show": "fxamp-show is timed by no command",
    "all": "call check, train, step, cost, policies and kernels, each with --json or --markdown",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``fxamp-bench SUBCOMMAND [option ...]``; returns 0, 1 if something measured failed, 2 after a mistake."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        return guarded("fxamp-bench", lambda: put(_usage()))
    if name not in SUBCOMMANDS:
        notice(_unknown(name) if name else _usage())
        return 2
    subcommand, prog = cast(Subcommand, import_module(SUBCOMMANDS[name][0])), f"fxamp-bench {name}"
    options = subcommand.parser(prog).parse_args(arguments[1:])
    failed: list[str] = []

    def measure() -> None:
        report = subcommand.run(options, say)
        put(report.text(options))
        failed.extend(report.failed)

    return guarded(prog, measure) or int(bool(failed))


def _unknown(name: str) -> str:
    if name in ELSEWHERE:
        return f"fxamp-bench: there is no subcommand {name!r}: {ELSEWHERE[name]}"
    hint = nearest(name, SUBCOMMANDS)
    return f"fxamp-bench: unknown subcommand {name!r}{hint}; accepted: {', '.join(SUBCOMMANDS)}"


def _usage() -> str:
    lines = [f"  {name:12}{purpose}" for name, (_, purpose) in SUBCOMMANDS.items()]
    return "\n".join(["usage: fxamp-bench SUBCOMMAND [--help] [option ...]", "", "subcommands:", *lines])


if __name__ == "__main__":
    raise SystemExit(main())
