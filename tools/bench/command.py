"""fxamp-bench: measures fxamp itself. Each subcommand is a module that is imported when it is called."""

import sys
from collections.abc import Sequence
from importlib import import_module

from fxamp.errors import nearest
from fxamp.tools.common.command_line import guarded
from fxamp.tools.common.output import notice, put

#: Subcommand -> (its module, what it measures). A module's ``main(arguments)`` returns the exit status.
SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "check": (
        "fxamp.tools.bench.check.command",
        "is what fxamp computes on this machine right? Minutes, on a GPU or a CPU",
    ),
    "passes": (
        "fxamp.tools.bench.passes.command",
        "time of capture and of each pass, and their share of a torch.compile",
    ),
    "show": ("fxamp.tools.bench.show", "time of fxamp-show on dumps of growing size, and of its start"),
    "train": (
        "fxamp.tools.bench.train.command",
        "training steps: eager, autocast, torch.compile and fxamp side by side",
    ),
    "cost": (
        "fxamp.tools.bench.cost.command",
        "bytes, launches and FLOPs of a step on a GPU, counted without one",
    ),
    "policies": (
        "fxamp.tools.bench.policies.command",
        "each shipped policy: what a step moves and keeps by the count, and its error; fxamp-policy list prints it",
    ),
    "kernels": (
        "fxamp.tools.bench.kernels.command",
        "gradient kernels against torch's foreach ops and the speed of a copy",
    ),
    "optimizers": (
        "fxamp.tools.bench.optimizers.command",
        "every optimizer with steps that skip on the device: agreement with torch, host syncs, bytes",
    ),
    "step": (
        "fxamp.tools.bench.step.command",
        "AdamW's step: the time of compiling it, and of a step, beside torch's",
    ),
    "all": (
        "fxamp.tools.bench.all",
        "all of it, into a folder: JSON, Markdown, charts",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``fxamp-bench SUBCOMMAND [option ...]``; returns the subcommand's status, 2 after a mistake."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in ("-h", "--help"):
        return guarded("fxamp-bench", lambda: put(_usage()))
    if not given:
        notice(_usage())
        return 2
    if given[0] not in SUBCOMMANDS:
        hint = nearest(given[0], SUBCOMMANDS)
        accepted = ", ".join(SUBCOMMANDS)
        notice(f"fxamp-bench: unknown subcommand {given[0]!r}{hint}; accepted: {accepted}")
        return 2
    module, _ = SUBCOMMANDS[given[0]]
    status: int = import_module(module).main(given[1:])
    return status


def _usage() -> str:
    lines = [f"  {name:12}{purpose}" for name, (_, purpose) in SUBCOMMANDS.items()]
    return "\n".join(["usage: fxamp-bench SUBCOMMAND [--help] [option ...]", "", "subcommands:", *lines])


if __name__ == "__main__":
    raise SystemExit(main())
