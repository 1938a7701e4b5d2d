"""fxamp-bench: measures fxamp itself. Each subcommand is a module that loads when it is called."""

from argparse import Namespace
from collections.abc import Sequence
from types import ModuleType

from fxamp.tools.bench.report import Report
from fxamp.tools.common.output import put
from fxamp.tools.common.progress import say
from fxamp.tools.common.subcommands import Subcommands, dispatch

#: Subcommand -> (its module, what it measures).
SUBCOMMANDS: Subcommands = {
    "check": (
        "fxamp.tools.bench.check.command",
        "check the numbers that fxamp computes on this machine: minutes, on a GPU or a CPU",
    ),
    "train": (
        "fxamp.tools.bench.train.command",
        "training steps: eager, autocast, torch.compile and fxamp side by side",
    ),
    "host": (
        "fxamp.tools.bench.host.command",
        "CPU time and calls that a step of tiny layers takes on the host, compared with torch's",
    ),
    "step": (
        "fxamp.tools.bench.train.step",
        "how long an optimizer's step takes to compile and to run, compared with torch's",
    ),
    "cost": (
        "fxamp.tools.bench.cost.command",
        "bytes, launches and FLOPs of a step on a GPU, counted without one",
    ),
    "policies": (
        "fxamp.tools.bench.cost.policies",
        "each shipped policy: what a step moves and keeps, as counted, and its error; fxamp-policy list prints it",
    ),
    "kernels": (
        "fxamp.tools.bench.cost.kernels.command",
        "the machine code of generated kernels: the most of a GPU's bandwidth that it permits, counted without one",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``fxamp-bench SUBCOMMAND [option ...]``; returns 0, 1 if something measured failed, 2 after a mistake."""
    return dispatch("fxamp-bench", SUBCOMMANDS, arguments, _measure)


def _measure(subcommand: ModuleType, options: Namespace) -> int:
    report: Report = subcommand.run(options, say)
    put(report.text(options))
    return int(bool(report.failed))


if __name__ == "__main__":
    raise SystemExit(main())
